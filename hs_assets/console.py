"""What the commands print: tables and chains for people; the commands print JSON themselves."""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hs_assets.config import DEFAULT_HOME, Project
from hs_assets.extraction.last_failure import LastFailure
from hs_assets.extraction.status import COMPLETE, DAMAGED, NOT_CONFIGURED, PartitionStatus, some_of
from hs_assets.samples.readable import runs, visible
from hs_assets.samples.show import ShownRow
from hs_assets.serving.state import UP, LeaseRecord, ServerState
from hs_assets.store.reader import Lineage
from hs_assets.wire.records import CountersRecord


def ledger_table(partitions: Sequence[PartitionStatus]) -> Table:
    """A line a partition, and their sum."""
    of = f" of layer set {partitions[0].layer_set}" if partitions else ""
    table = Table(title=f"ledger{of}: in = stored + dropped + failed (+ pending, before extraction)", title_justify="left")
    table.add_column("partition")
    table.add_column("state")
    for name in ("in", "stored", "dropped", "failed", "pending", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("reasons")
    for one in partitions:
        counts = (one.rows, one.stored, sum(one.dropped.values()), sum(one.failed.values()), one.pending, one.tokens)
        style = {COMPLETE: "green", DAMAGED: "red"}.get(one.state, "yellow")
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted({**one.dropped, **one.failed}.items()))
        if one.layer_set != partitions[0].layer_set:
            reasons = ", ".join(filter(None, (f"in layer set {one.layer_set}", reasons)))
        if one.problem is not None:
            reasons = one.problem.partition("\n")[0]
        table.add_row(one.partition, f"[{style}]{one.state}[/]", *(f"{count:,}" for count in counts), escape(reasons))
    sums = [
        sum(values)
        for values in zip(
            *(
                (one.rows, one.stored, sum(one.dropped.values()), sum(one.failed.values()), one.pending, one.tokens)
                for one in partitions
            ),
            strict=True,
        )
    ] or [0] * 6
    odd = Counter(one.state for one in partitions if one.state in (DAMAGED, NOT_CONFIGURED))
    said = ", ".join(f"{count} {state}" for state, count in odd.items())
    table.add_section()
    table.add_row(
        f"{len(partitions)} partition{'s' * (len(partitions) != 1)}", said, *(f"{value:,}" for value in sums), "", style="bold"
    )
    return table


def failure_lines(failures: Mapping[str, LastFailure]) -> list[str]:
    """Why the last runs of partitions failed, a line for each reason, the one that most of them share first."""
    by_error: dict[str, list[str]] = {}
    for partition, failure in failures.items():
        by_error.setdefault(failure.error, []).append(partition)
    lines = []
    for error, partitions in sorted(by_error.items(), key=lambda item: -len(item[1])):
        last = max((failures[partition] for partition in partitions), key=lambda failure: failure.at)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at))
        lines.append(f"the last run of {some_of(partitions)} failed, {when}, run {last.run_id}: {error}")
    return lines


def lineage_tree(record: Lineage) -> Tree:
    """A sample's lineage as a chain, from its states down to the row of a file."""
    tree = Tree(f"[bold]{record.sample_id}[/] in layer set {record.layer_set}")
    node = tree
    for part in record.parts:
        ids = ", ".join(str(i) for i in part.residual_ids)
        node = node.add(f"states {ids}: generation {part.generation}, rows from {part.offset}")
    part, spec = record.parts[-1], record.state_spec
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part.captured_at))
    weights = f"{spec['model_class']} {spec['weight_fingerprint']}, SGLang {spec['sglang_version']}, {spec['dtype']}"
    texts = f"template {record.template_sha256[:12]}, tokenizer {record.tokenizer_sha256[:12]}"
    node = node.add(f"dump {part.dump_crc32:08x}, captured {when} by server {part.server}, run {part.run_id}")
    node = node.add(f"state spec {record.state_fingerprint}: {weights}")
    node = node.add(f"token ids {record.token_sha256[:16]}: {texts}")
    node = node.add(f"prompt partition {record.partition}, version {record.prompts_version}")
    node.add(f"{record.source_path}, row {record.source_row} (sha256 {record.source_sha256[:16]})")
    return tree


def server_lines(
    phase: str,
    state: ServerState | None,
    leases: Sequence[LeaseRecord],
    dumps: int,
    used: int,
    counters: CountersRecord | None,
) -> list[str]:
    """What is known of a server, a line each."""
    if state is None:
        return ["no server was started in this home"]
    owner = "started by somebody else" if state.attached else f"watchdog {state.watchdog_pid}"
    uptime = f", up for {datetime.timedelta(seconds=round(time.time() - state.started_at))}" if phase == UP else ""
    lines = [
        f"server    {state.server}: {phase}",
        f"model     {state.model_path}",
        f"identity  {state.identity}, states {state.state_fingerprint}, residual ids {', '.join(map(str, state.residual_ids))}",
        f"process   {state.pid} (SGLang {state.sglang_version}), {owner}, at {state.url}",
        f"started   {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(state.started_at))}{uptime}",
        f"spool     {state.spool}: {dumps} requests and dumps hold {used:,} of {state.spool_bytes:,} bytes",
        f"log       {state.log or 'where it was started'}",
        f"says      {state.message}",
    ]
    if counters is not None:
        failures = ", ".join(f"{reason} {count}" for reason, count in counters.failures.items()) or "none"
        lines += [
            f"captured  {counters.dumps:,} dumps, {counters.tokens:,} tokens, {counters.bytes:,} bytes; failed: {failures}",
            f"now       {counters.tokens_per_second:,.0f} tokens/s, {counters.pending_bytes:,} bytes not written yet",
            f"at most   {counters.spool_high_water_bytes:,} bytes in the spool, {counters.device_high_water_bytes:,} uncopied",
            f"spent     {counters.writer_seconds:.1f} s by writers, {counters.scheduler_seconds:.2f} s on the scheduler's thread",
        ]
    return lines + [f"lease     {lease.purpose} (pid {lease.pid}, {time.time() - lease.since:.0f} s)" for lease in leases]


def shown_row(shown: ShownRow, *, colour: bool, ids: bool) -> Text:
    """A row as it is rendered, what is supervised in colour, else in ⟦ ⟧; the facts about it below.

    Arguments:
        ids: a line for every piece, with its ids.
    """
    text = Text()
    if ids:
        for piece in shown.pieces:
            line = f"{' '.join(map(str, piece.ids)):>8}  "
            text.append(line).append_text(_words(repr(piece.text), piece.supervised, piece.special, colour)).append("\n")
    elif colour:
        for run in runs(iter(shown.pieces)):
            text.append_text(_words(run.text, run.supervised, run.special, colour))
    else:
        for supervised, group in itertools.groupby(shown.pieces, lambda piece: piece.supervised):
            text.append_text(_words("".join(piece.text for piece in group), supervised, False, colour))
    if not text.plain.endswith("\n") and shown.pieces:
        text.append("\n")
    return text.append("\n".join(f"{label:<9} {visible(value)}" for label, value in _facts(shown)))


def _words(words: str, supervised: bool, special: bool, colour: bool) -> Text:
    if not colour:
        return Text(f"⟦{visible(words)}⟧" if supervised else visible(words))
    return Text(visible(words), " ".join(["bold green"] * supervised + ["reverse"] * special))


def _facts(shown: ShownRow) -> list[tuple[str, str]]:
    made, row = shown.partition, shown.row
    read_as = (f" as {row.format}" if row.format else "") + (f", for turn {row.turn} alone" if row.turn is not None else "")
    facts = [
        ("sample", f"{row.sample_id}, prompts version {made.version}"),
        ("source", f"{made.source.path}, row {row.source_row}{read_as} (sha256 {row.source_sha256[:16]})"),
    ]
    if shown.dropped is not None:
        facts.append(("dropped", f"{shown.dropped.reason}: {shown.dropped.detail}"))
        facts += [("row", shown.raw)] if shown.raw is not None else []
    else:
        facts.append(("tokens", f"{shown.tokens:,}, {shown.supervised:,} supervised ({shown.supervised / shown.tokens:.1%})"))
    if row.origin.finish_reasons:
        ways = ", ".join(f"{f} ({r})" for f, r in zip(row.origin.finish_reasons, row.origin.renderings, strict=True))
        facts.append(("answers", f"by {row.origin.answered_by}: {ways}"))
    facts += [
        (f"norm {residual_id}", f"mean {norms.mean:.4g}, {norms.smallest:.4g} to {norms.largest:.4g}")
        for residual_id, norms in shown.norms.items()
    ]
    if shown.lineage is not None:
        part = shown.lineage.parts[-1]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part.captured_at))
        spec = shown.lineage.state_fingerprint
        facts.append(("states", f"{shown.lineage.layer_set}, spec {spec}, by server {part.server}, {when}, run {part.run_id}"))
    if shown.unstored is not None:
        facts.append((shown.unstored.outcome, f"{shown.unstored.reason}: {shown.unstored.detail}"))
    return facts + [("note", note) for note in shown.notes]


def next_steps(project: Project, sample_id: str | None) -> str:
    """What to type after the demo."""
    default = project.home.root == Path(DEFAULT_HOME).absolute()
    here = "" if shutil.which("hs-assets") else os.path.relpath(Path(sys.executable).parent) + "/"
    home = "" if default else f" --home {project.home.root}"
    ui = f"{here}dagster dev"
    if not default:
        ui = f"HS_ASSETS_HOME={project.home.root} DAGSTER_HOME={project.home.dagster} {ui} -m hs_assets.definitions"
    steps = [
        (ui, "the same partitions in the browser, at http://127.0.0.1:3000"),
        (f"{here}hs-assets status{home}", "the ledger again"),
        (f"{here}hs-assets lineage {sample_id or 'SAMPLE_ID'}{home}", "where a sample came from"),
        (f"{here}hs-assets show {sample_id or 'SAMPLE_ID'}{home}", "its text, with what is supervised"),
        (f"{here}hs-assets verify{home}", "read and check every stored byte"),
        (f"{here}hs-assets server stop{home}", "the server stops by itself when nobody uses it"),
    ]
    return "\n".join(["what to type next:", *(f"  # {what}\n  {command}" for command, what in steps)])


def make_console(*, stderr: bool = False) -> Console:
    """The terminal; wide enough for the tables where there is none."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=160)
