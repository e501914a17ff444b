"""Extract one partition: plan, capture what is missing, store it, and report."""

from __future__ import annotations

import dataclasses
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hs_assets.config import Project
from hs_assets.errors import ServerDiedError, SpoolError
from hs_assets.extraction.intake import SERVER_DIED, Destination, Intake
from hs_assets.extraction.plan import Plan, free_bytes, make_plan
from hs_assets.extraction.progress import Progress
from hs_assets.samples.model import load_head
from hs_assets.samples.prompts import Prompt
from hs_assets.samples.rules import Expected, Validator
from hs_assets.serving.admission import KEPT, adopt, spool_use, sweep
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings, Failed
from hs_assets.serving.launch import Target, make_launch_plan
from hs_assets.serving.server import lease_server
from hs_assets.serving.state import ServerFolder, ServerState, read_counters
from hs_assets.store.layout import create
from hs_assets.store.manifest import Manifest
from hs_assets.store.masks import write_final_norm
from hs_assets.store.writer import ArrayShape
from hs_assets.wire.records import CommitRecord, CountersRecord
from hs_assets.wire.rid import parse_rid
from hs_assets.wire.spool import Spool

Say = Callable[[str], None]


@dataclass(slots=True)
class Report:
    """What a run did with a partition. Bytes of dumps and of the store; seconds of capture, without the server's start."""

    plan: Plan
    requests: int = 0
    adopted: int = 0
    captured_tokens: int = 0
    dump_bytes: int = 0
    seconds: float = 0.0
    waited_for_spool_seconds: float = 0.0
    spool_high_water_bytes: int = 0
    counters: CountersRecord | None = None
    """Of the rank that writes, as they stood at the end."""
    server: ServerState | None = None
    manifest: Manifest | None = None
    manifest_changed: bool = False
    intake: Intake | None = None
    kept: int = 0
    problems: list[str] = field(default_factory=list)
    """Why the partition is not complete; empty if it is."""
    died: str | None = None
    """How the server went away under the run, if it did."""

    @property
    def tokens_per_second(self) -> float:
        return self.captured_tokens / self.seconds if self.seconds else 0.0


def extract(project: Project, target: Target, key: str, run_id: str, say: Say) -> Report:
    """Capture and store what is missing of a partition. A run that is cut short leaves what it got, whole.

    Raises:
        HsAssetsError: it cannot begin. What goes wrong later is in the report's `problems`.
    """
    with alone(project, key, say):
        return _extract(project, target, key, run_id, say)


def _extract(project: Project, target: Target, key: str, run_id: str, say: Say) -> Report:
    paths = create(project.store_path)
    plan = make_plan(project, target, paths, key)
    report = Report(plan)
    say(
        f"{len(plan.to_capture)} of {len(plan.prompts.prompts)} samples are missing: {plan.store_bytes:,} bytes for the store, "
        f"where {free_bytes(paths.root):,} are free"
    )
    head = load_head(target.facts)
    rules = project.settings.rules
    if not isinstance(head, str):
        write_final_norm(paths, target.spec.weight_fingerprint, target.facts.model_class, head.norm_weight, head.norm_eps)
    expected = Expected(
        target.layer_set.residual_ids,
        target.facts.hidden_size,
        plan.layout.dtype,
        head,
        rules.logprob_tolerance,
        rules.prefix_cosine,
        rules.prefix_share,
    )
    store = project.settings.store
    shape = ArrayShape(target.facts.hidden_size, plan.layout.dtype, store.chunk_tokens, store.shard_tokens, store.compression)
    spec = dataclasses.asdict(target.spec)
    destination = Destination(paths, target.spec.fingerprint, spec, run_id, shape)
    intake = report.intake = Intake(plan, destination, Validator(expected), say)
    try:
        with _outcomes(project, target, report, say) as (outcomes, client):
            limit = min(store.generation_bytes, client.spool_bytes // 4) if client else store.generation_bytes
            for outcome in outcomes:
                if outcome is not None:
                    intake.take(outcome)
                starving = outcome is None and client is not None and client.admission.blocked
                if intake.unpublished_bytes >= (1 if starving else limit):
                    intake.publish()
    except ServerDiedError as error:
        for prompt in plan.to_capture:
            intake.failed.setdefault(prompt.row, (SERVER_DIED, error.problem))
        report.died = str(error)
        report.problems.append(report.died)
    finally:
        intake.finish()
    report.manifest, report.manifest_changed = intake.write_manifest(), intake.manifest_changed
    report.problems += _problems(project, report.manifest)
    return report


def capture_only(project: Project, target: Target, key: str, say: Say) -> Report:
    """Capture what is missing of a partition and leave the dumps in the spool.

    Raises:
        SpoolError: they cannot fit; nothing was asked then.
        HsAssetsError: it cannot begin. What goes wrong later is in the report's `problems`.
    """
    with alone(project, key, say):
        return _capture_only(project, target, key, say)


def _capture_only(project: Project, target: Target, key: str, say: Say) -> Report:
    paths = create(project.store_path)
    plan = make_plan(project, target, paths, key)
    report = Report(plan)
    spool = Spool(project.spool_path)
    try:
        with _outcomes(project, target, report, say, keep=True) as (outcomes, _):
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    report.problems.append(f"{key}/{outcome.prompt.row:04d} failed: {outcome.reason}: {outcome.detail}")
                elif outcome is not None:
                    adopt(spool, outcome.files, KEPT)
                    report.kept += 1
    except ServerDiedError as error:
        report.died = str(error)
        report.problems.append(report.died)
    return report


@contextmanager
def alone(project: Project, key: str, say: Say) -> Iterator[None]:
    """Keep a second run of the partition waiting: it would write what it makes from what it knew before."""
    path = project.home.locks / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is at {key}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _outcomes(
    project: Project, target: Target, report: Report, say: Say, *, keep: bool = False
) -> Iterator[tuple[Iterator[Captured | Failed | None], CaptureClient | None]]:
    """The outcomes for all prompts that need the server: first the dumps that lie in the spool, then what it captures.

    The server is not even started where nothing is missing.
    """
    plan, key = report.plan, report.plan.prompts.key
    here = _adopt(project, target, plan, say)
    report.adopted = len(here)
    got = {captured.prompt.row for captured in here}
    asked = [prompt for prompt in plan.to_capture if prompt.row not in got]
    if not asked:
        yield iter(here), None
        return
    folder = ServerFolder(project.home.server)
    launch_plan = make_launch_plan(project, target)
    server = project.settings.server
    settings = ClientSettings(server.max_in_flight, server.request_timeout_seconds, server.commit_timeout_seconds)
    with (
        lease_server(folder, launch_plan, f"extraction of {key}", say) as state,
        CaptureClient(folder, state, plan.layout, settings, say) as client,
    ):
        if keep:
            _check_room(plan, asked, state.spool_bytes, project)
        report.server = state
        began = time.monotonic()
        try:
            yield _watched(here, client.capture(key, asked), report, len(asked), say), client
        finally:
            report.seconds = time.monotonic() - began
            report.waited_for_spool_seconds = client.admission.waited_seconds
            report.spool_high_water_bytes = client.admission.high_water_bytes
            report.counters = read_counters(Spool(project.spool_path), 0)


def _watched(
    here: list[Captured], captures: Iterator[Captured | Failed | None], report: Report, total: int, say: Say
) -> Iterator[Captured | Failed | None]:
    """The outcomes, counted, with a line on the progress every few seconds."""
    yield from here
    progress = Progress(total, "requests", say)
    for outcome in captures:
        if outcome is not None:
            report.requests += 1
        if isinstance(outcome, Captured):
            report.captured_tokens += len(outcome.prompt.input_ids)
            report.dump_bytes += outcome.files.data.stat().st_size
        yield outcome
        progress.tell(report.requests, report.captured_tokens)


def _adopt(project: Project, target: Target, plan: Plan, say: Say) -> list[Captured]:
    """Whole dumps of this partition that an earlier run left in the spool, as far as they are what is asked for."""
    spool = Spool(project.spool_path)
    if not spool.dumps.is_dir():
        return []
    if freed := sweep(spool):
        say(f"freed {freed} dumps that a crash had left half done")
    wanted: dict[int, Prompt] = {prompt.row: prompt for prompt in plan.to_capture}
    adopted = []
    for text in spool.rids():
        rid, files = parse_rid(text), spool.dump(text)
        if rid is None or rid.partition != plan.prompts.key or not files.whole or not adopt(spool, files):
            continue
        commit, prompt = CommitRecord.read(files.commit), wanted.pop(rid.row, None)
        asked_for = (target.spec.fingerprint, target.layer_set.residual_ids, prompt.token_sha256 if prompt else None)
        if prompt is not None and (commit.state_fingerprint, commit.residual_ids, commit.token_sha256) == asked_for:
            adopted.append(Captured(prompt, files))
        else:
            files.free()
    return adopted


def _check_room(plan: Plan, asked: list[Prompt], budget: int, project: Project) -> None:
    needed = sum(plan.dump_bytes(prompt) for prompt in asked)
    _, used = spool_use(project.spool_path)
    if needed > budget - used:
        raise SpoolError(
            "the dumps of this partition do not fit into the spool together",
            where=plan.prompts.key,
            expected=f"{needed:,} bytes for {len(asked)} dumps",
            got=f"{budget - used:,} of {budget:,} bytes left",
            remedy="materialise raw_dumps and eagle3_samples together, which streams them, or raise server.spool_bytes",
        )


def _problems(project: Project, manifest: Manifest) -> list[str]:
    ledger = manifest.ledger
    problems = [f"{count} rows failed: {reason}" for reason, count in sorted(ledger.failed.items())]
    refused = sum(count for reason, count in ledger.dropped.items() if reason.startswith("rejected("))
    limit = project.settings.rules.max_rejected_share
    if refused > limit * ledger.rows:
        problems.append(f"{refused} of {ledger.rows} rows are rejected, more than the share of {limit}")
    return problems
