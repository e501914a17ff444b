"""What capture costs: prefill with it and without, the same server flags and prompts, in one run.

    python -m hs_assets_tests.benchmarks.capture --model PATH [--python SGLANG_PYTHON] [--seconds 60] [--variants A,D]

    A   plain prefill, plugin absent; ``defaults``: the same with SGLang's own defaults
    B   the scripts that this replaces: one request at a time, .cpu(), torch.save to /dev/shm, wait for the file
    C   SGLang's return_hidden_states, last layer, JSON
    D   ours, up to the last commit record; the consumer frees each dump as it comes
    S   prompts of mixed lengths, one at a time: ours must be B's to the byte, which copies before the forward pass goes on
    V   the same under mixed load, and each row is held against the checksum that was made on the device
    P   the whole pipeline into the zarr store, `--runs` partitions at once, each in its own process
    Q   the same prompts alone and 32 at a time: quantiles of the cosine of each row's states, which differ in bf16 by the batch
    M   ours, 10,000 short prompts: every id once, the spool empty at the end, the server's memory after a half and at the end
    E   HF transformers, padded batches of 8, output_hidden_states=True, torch.save a sample

Prints a line a measurement: tokens/s, ratio to A, GB/s of dumps, CPU seconds of the server a GB beyond A's, and what it ran on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil

from hs_assets.config import Project, load_project
from hs_assets.extraction.extract import extract
from hs_assets.extraction.status import sources
from hs_assets.samples.eagle3 import load_sample
from hs_assets.samples.filters import limits_of
from hs_assets.samples.prepare import prompt_options
from hs_assets.samples.prompts import Prompt, PromptPartition, PromptRow, write_partition
from hs_assets.samples.tokenizer import hash_files, hash_of_template
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings, ask
from hs_assets.serving.engine import FLAGS
from hs_assets.serving.launch import Target, expose_plugin, make_launch_plan, resolve
from hs_assets.serving.server import kill_tree, lease_server, stop_server
from hs_assets.serving.state import ServerFolder, ServerState, read_counters
from hs_assets.serving.watchdog import answers, free_port
from hs_assets.store import open_store
from hs_assets.wire.records import CommitRecord
from hs_assets.wire.rid import sample_id
from hs_assets.wire.spool import Spool
from hs_assets_tests.plugins import make_plugin

LOG_NORMAL = (math.log(1024), 1.0, 64, 8192)
"""Mean and deviation of the logarithm of a length, and the shortest and longest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One line. Bytes are those of dumps, or of what stands in their place."""

    variant: str
    in_flight: int
    lengths: str
    requests: int
    tokens: int
    seconds: float
    bytes: int
    server_cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_prompts(kind: str, tokens: int, budget: int, vocab_size: int, seed: int = 3) -> list[Prompt]:
    """Prompts of random ids with `budget` tokens in all, of equal or log-normal length."""
    random, prompts, total = np.random.default_rng(seed), [], 0
    while total < budget:
        mean, deviation, shortest, longest = LOG_NORMAL
        length = tokens if kind == "equal" else int(np.clip(random.lognormal(mean, deviation), shortest, longest))
        prompts.append(Prompt.supervised(len(prompts), random.integers(vocab_size // 8, vocab_size * 3 // 4, length)))
        total += length
    return prompts


@contextmanager
def plain_server(argv: list[str], env: dict[str, str], log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server that is not ours: gives its URL and main process."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, "--port", str(port)], env={**os.environ, **env}, stdout=output, stderr=output, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not come up:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        kill_tree(process.pid)
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and all below it."""
    family = [process, *process.children(recursive=True)]
    return sum(times.user + times.system for times in (member.cpu_times() for member in family))


def anonymous_bytes(process: psutil.Process) -> int:
    """Memory of a process and all below it that is no file's: not the blocks, nor the spool, which are shared."""
    statuses = (Path(f"/proc/{one.pid}/status").read_text() for one in [process, *process.children(recursive=True)])
    return sum(int(line.split()[1]) << 10 for status in statuses for line in status.splitlines() if line.startswith("RssAnon"))


def measure(
    variant: str, in_flight: int, lengths: str, prompts: list[Prompt], server: psutil.Process, send: Callable[[Prompt], int]
) -> Measurement:
    """Send all prompts, `in_flight` at a time; `send` gives the bytes that came of one."""
    before, began = cpu_seconds(server), time.monotonic()
    with ThreadPoolExecutor(in_flight) as pool:
        size = sum(pool.map(send, prompts))
    seconds = time.monotonic() - began
    tokens = sum(len(prompt.input_ids) for prompt in prompts)
    return Measurement(variant, in_flight, lengths, len(prompts), tokens, seconds, size, cpu_seconds(server) - before)


def measure_ours(
    in_flight: int,
    lengths: str,
    prompts: list[Prompt],
    project: Project,
    target: Target,
    state: ServerState,
    variant: str = "D",
    look: Callable[[Captured], None] = lambda _: None,
) -> Measurement:
    """The same through the pipeline's own client; ends when the last dump was committed, looked at, and freed."""
    settings = ClientSettings(in_flight, 600, 120)
    server = psutil.Process(state.pid)
    before, began, size, failed, answered = cpu_seconds(server), time.monotonic(), 0, [], 0.0
    with CaptureClient(ServerFolder(project.home.server), state, target.layout, settings, say) as client:
        for outcome in client.capture("benchmark", prompts):
            if isinstance(outcome, Captured):
                size += outcome.files.data.stat().st_size
                answered = max(answered, outcome.files.answer.stat().st_mtime)
                look(outcome)
                outcome.files.free()
            elif outcome is not None:
                failed.append(outcome)
        seconds = time.monotonic() - began
        admission = client.admission
        say(f"    the last dump was there {time.time() - answered:.2f} s after the last answer")
        say(f"    spool high water {admission.high_water_bytes / 2**30:.2f} GiB, waited {admission.waited_seconds:.2f} s")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(prompts)} requests failed, the first: {failed[0].reason}: {failed[0].detail}")
    say(f"    {read_counters(Spool(Path(state.spool)), 0)}")
    tokens = sum(len(prompt.input_ids) for prompt in prompts)
    return Measurement(variant, in_flight, lengths, len(prompts), tokens, seconds, size, cpu_seconds(server) - before)


def ask_plain(url: str, http: httpx.Client, prompt: Prompt) -> int:
    ask(http, url, f"plain.{prompt.row}.{time.monotonic_ns()}", prompt.input_ids.tolist())
    return 0


def ask_with_states(url: str, http: httpx.Client, prompt: Prompt) -> int:
    """Variant C: the states come back in the answer, as JSON, which is parsed."""
    body = {
        "input_ids": prompt.input_ids.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_hidden_states": True,
    }
    response = http.post(f"{url}/generate", json=body)
    response.raise_for_status()
    json.loads(response.content)
    return len(response.content)


def write_old(url: str, http: httpx.Client, spool: Path, prompt: Prompt) -> Path:
    """Variant B: trigger, wait for the file."""
    rid = f"old.{prompt.row}.{time.monotonic_ns()}.T{len(prompt.input_ids)}"
    ask(http, url, rid, prompt.input_ids.tolist())
    path = spool / f"{rid}.pt"
    while not path.exists():
        time.sleep(0.001)
    return path


def ask_old(url: str, http: httpx.Client, spool: Path, prompt: Prompt) -> int:
    """The same, and the file is removed."""
    path = write_old(url, http, spool, prompt)
    size = path.stat().st_size
    path.unlink()
    return size


def measure_transformers(python: str, model: Path, prompts: list[Prompt], dtype: str, env: dict[str, str]) -> Measurement:
    """Variant E, in a process of its own; the model's load is not counted."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "prompts.json").write_text(json.dumps([prompt.input_ids.tolist() for prompt in prompts]))
        script = Path(__file__).with_name("transformers_batches.py")
        command = [python, str(script), str(model), folder, dtype]
        result = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-3000:])
    said = json.loads(result.stdout.splitlines()[-1])
    tokens = sum(len(prompt.input_ids) for prompt in prompts)
    return Measurement("E", 8, "equal", len(prompts), tokens, said["seconds"], said["bytes"], said["cpu_seconds"])


def report(lines: list[Measurement], machine: str) -> str:
    """A table, repeats added up; the ratio is to A with the same requests in flight and lengths, or to A's best."""
    lines = [_sum(list(same)) for _, same in itertools.groupby(sorted(lines, key=_name), key=_name)]
    plain = {(line.in_flight, line.lengths): line for line in lines if line.variant == "A"}
    best = max((line for line in lines if line.variant == "A"), key=lambda line: line.rate, default=None)
    header = ("flight", "lengths", "requests", "tokens/s", "to A", "GB/s", "core-s/GB", "seconds")
    rows = [machine, _row("", header)]
    for line in lines:
        base = plain.get((line.in_flight, line.lengths), best)
        ratio = f"{line.rate / base.rate:.3f}" if base else "-"
        beyond = line.server_cpu_seconds - (base.server_cpu_seconds * line.tokens / base.tokens if base else 0)
        each = f"{beyond / (line.bytes / 1e9):.2f}" if line.bytes and line.variant in "DSVQMP" else "-"
        written = f"{line.bytes / 1e9 / line.seconds:.2f}" if line.bytes else "-"
        counts = (line.in_flight, line.lengths, line.requests, f"{line.rate:,.0f}")
        rows.append(_row(line.variant, (*counts, ratio, written, each, f"{line.seconds:.1f}")))
    return "\n".join(rows)


def _name(line: Measurement) -> tuple[str, str, int]:
    return line.variant, line.lengths, line.in_flight


def _sum(lines: list[Measurement]) -> Measurement:
    added = ("requests", "tokens", "seconds", "bytes", "server_cpu_seconds")
    return dataclasses.replace(lines[0], **{name: sum(getattr(line, name) for line in lines) for name in added})


def _row(name: str, cells: Sequence[object]) -> str:
    return f"{name:9}" + "".join(f"{cell!s:>11}" for cell in cells)


def machine_of(python: str, target: Target) -> str:
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU', torch.__version__)"
    seen = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    cores, memory = os.cpu_count(), psutil.virtual_memory().total / 2**30
    model = f"{target.facts.model_class}, {target.facts.num_layers} layers of {target.facts.hidden_size}, {target.spec.dtype}"
    sglang = f"SGLang {target.spec.sglang_version}"
    return f"{seen}; {cores} cores, {memory:.0f} GiB, {platform.platform()}; {sglang}; {model}; {target.layer_set.id}"


def main() -> None:
    arguments = _arguments()
    lines: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        project = project_of(root, arguments)
        target = resolve(project)
        machine = machine_of(str(target.python), target)
        say(machine)
        try:
            for line in _run(root, project, target, arguments):
                lines.append(line)
                say(f"    {line.variant} {line.in_flight} {line.lengths}: {line.rate:,.0f} tokens/s in {line.seconds:.1f} s")
        finally:
            stop_server(ServerFolder(project.home.server), say, force=True)
            shutil.rmtree(project.spool_path, ignore_errors=True)
    print(report(lines, machine))
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))


def _run(root: Path, project: Project, target: Target, arguments: argparse.Namespace) -> Iterator[Measurement]:
    variants, flights = arguments.variants.split(","), [int(n) for n in arguments.in_flight.split(",")]
    kinds = arguments.lengths.split(",")
    without_plugin = {**target.env}
    vocab, rates = target.facts.vocab_size, {}

    def prompts_for(kind: str, flight: int, seconds: float) -> list[Prompt]:
        rate = rates.get((kind, flight), arguments.guess)
        return make_prompts(kind, arguments.tokens, max(int(rate * seconds), arguments.tokens * flight * 2), vocab)

    with httpx.Client(timeout=900, limits=httpx.Limits(max_connections=256), trust_env=False) as http:
        old: dict[int, str] = {}
        mixed = make_prompts("log-normal", 0, int(arguments.guess), vocab) if "S" in variants else []
        if {"B", "S"} & set(variants):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as spool:
                env = {**without_plugin, **_old_plugin(root, target, spool)}
                with plain_server(list(target.argv), env, root / "b.log") as (url, server):
                    few = make_prompts("equal", arguments.tokens, arguments.tokens * 24, vocab)
                    measure("warm", 1, "equal", few[:2], server, lambda p: ask_old(url, http, Path(spool), p))
                    if "B" in variants:
                        yield measure("B", 1, "equal", few, server, lambda p: ask_old(url, http, Path(spool), p))
                    old = _digests(str(target.python), {p.row: write_old(url, http, Path(spool), p) for p in mixed})
        with _servers(variants, project, target, root) as (plain, ours):
            for kind, flight in itertools.product(kinds, flights) if {"A", "D"} & set(variants) else ():
                warm = make_prompts(kind, arguments.tokens, arguments.tokens * flight * 2, vocab)
                if plain:
                    rates[kind, flight] = measure("warm", flight, kind, warm, plain[1], partial(ask_plain, plain[0], http)).rate
                if ours:
                    measure_ours(flight, kind, warm, project, target, ours)
                prompts = prompts_for(kind, flight, arguments.seconds)
                for _ in range(arguments.repeats):  # in turn: what drifts, drifts for both
                    if plain:
                        yield measure("A", flight, kind, prompts, plain[1], partial(ask_plain, plain[0], http))
                    if ours and "D" in variants:
                        yield measure_ours(flight, kind, prompts, project, target, ours)
            if ours and "S" in variants:
                yield _synchronous(mixed, old, project, target, ours)
            if ours and "V" in variants:
                yield _verified(make_prompts("log-normal", 0, arguments.rows, vocab), project, target, ours)
            if ours and "Q" in variants:
                yield _alone_and_together(make_prompts("log-normal", 0, arguments.rows // 4, vocab), project, target, ours)
            if ours and "M" in variants:
                yield _many(make_prompts("equal", 64, 64 * arguments.many, vocab), project, target, ours)
            if ours and "P" in variants:
                prompts = prompts_for("equal", max(flights), arguments.seconds / 2)
                yield _pipeline(prompts, project, target, ours, arguments.runs, arguments.partition_rows)
        if "defaults" in variants:
            argv = _defaults(target, arguments)
            with plain_server(argv, without_plugin, root / "defaults.log") as (url, server):
                for flight in flights:  # never the same prompts twice: its radix cache is on
                    warm = make_prompts("equal", arguments.tokens, arguments.tokens * flight * 2, vocab, seed=100 + flight)
                    measure("warm", flight, "equal", warm, server, lambda p: ask_plain(url, http, p))
                    budget = int(rates.get(("equal", flight), arguments.guess) * arguments.seconds / 3)
                    prompts = make_prompts("equal", arguments.tokens, budget, vocab, seed=200 + flight)
                    yield measure("defaults", flight, "equal", prompts, server, lambda p: ask_plain(url, http, p))
        if "C" in variants:
            argv = [*target.argv, "--enable-return-hidden-states"]
            with plain_server(argv, without_plugin, root / "c.log") as (url, server):
                few = make_prompts("equal", arguments.tokens, arguments.tokens * 4, vocab)
                measure("warm", 1, "equal", few[:1], server, lambda p: ask_plain(url, http, p))
                yield measure("C", 1, "equal", few, server, lambda p: ask_with_states(url, http, p))
        if "E" in variants:
            few = make_prompts("equal", arguments.tokens, arguments.tokens * 32, vocab)
            yield measure_transformers(str(target.python), target.facts.path, few, target.spec.dtype, without_plugin)


@contextmanager
def _servers(
    variants: Sequence[str], project: Project, target: Target, root: Path
) -> Iterator[tuple[tuple[str, psutil.Process] | None, ServerState | None]]:
    """The plain server and ours, as far as the variants need them; both start at once."""
    plain, ours = None, None
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        starting = None
        if set("DSVQMP") & set(variants):
            lease = lease_server(ServerFolder(project.home.server), make_launch_plan(project, target), "benchmark", say)
            starting = pool.submit(stack.enter_context, lease)
        if "A" in variants:
            plain = stack.enter_context(plain_server(list(target.argv), {**target.env}, root / "a.log"))
        if starting is not None:
            ours = starting.result()
        yield plain, ours
    stop_server(ServerFolder(project.home.server), say, force=True)


_DIGEST = """
import hashlib, json, sys, torch
for row, path in json.loads(sys.argv[1]).items():
    states = torch.stack(torch.load(path, weights_only=True)["hidden_states"], 1).contiguous()  # [T, slots, H]
    print(json.dumps([int(row), hashlib.sha256(states.view(torch.uint8).numpy()).hexdigest()]))
"""


def _digests(python: str, files: dict[int, Path]) -> dict[int, str]:
    """Row → sha256 of the states in a file of variant B, [tokens, slots, hidden]; read where torch is."""
    command = [python, "-c", _DIGEST, json.dumps({row: str(path) for row, path in files.items()})]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in result.stdout.splitlines())


def _synchronous(prompts: list[Prompt], old: dict[int, str], project: Project, target: Target, state: ServerState) -> Measurement:
    equal: list[bool] = []

    def look(captured: Captured) -> None:
        states = load_sample(captured.prompt, captured.files).states
        equal.append(hashlib.sha256(states.tobytes()).hexdigest() == old[captured.prompt.row])

    line = measure_ours(1, "log-normal", prompts, project, target, state, "S", look)
    say(f"    {sum(equal)} of {len(prompts)} dumps ({line.tokens:,} rows) are to the byte what the synchronous scripts wrote")
    if not all(equal) or len(equal) != len(prompts):
        raise SystemExit("dumps differ from those of the synchronous scripts")
    return line


def _verified(prompts: list[Prompt], project: Project, target: Target, state: ServerState) -> Measurement:
    rows = 0

    def look(captured: Captured) -> None:
        nonlocal rows
        sample = load_sample(captured.prompt, captured.files)  # raises where a row is not what its checksum says
        if not np.array_equal(sample.token_ids, captured.prompt.input_ids):
            raise SystemExit(f"{captured.files.rid} has other token ids than its prompt")
        rows += len(sample.states)

    line = measure_ours(32, "log-normal", prompts, project, target, state, "V", look)
    say(f"    {rows:,} rows of {len(prompts)} dumps are what their checksums say")
    return line


def _alone_and_together(prompts: list[Prompt], project: Project, target: Target, state: ServerState) -> Measurement:
    alone: dict[int, np.ndarray] = {}
    cosines: dict[int, list[np.ndarray]] = {residual_id: [] for residual_id in target.layer_set.residual_ids}
    equal: list[bool] = []

    def keep(captured: Captured) -> None:
        alone[captured.prompt.row] = load_sample(captured.prompt, captured.files).states.copy()

    def compare(captured: Captured) -> None:
        states, other = load_sample(captured.prompt, captured.files).states, alone.pop(captured.prompt.row)
        equal.extend((states.view("<u2") == other.view("<u2")).all(axis=(1, 2)))
        for slot, of_all in enumerate(cosines.values()):
            one, two = states[:, slot].astype(np.float64), other[:, slot].astype(np.float64)
            of_all.append((one * two).sum(1) / np.sqrt((one * one).sum(1) * (two * two).sum(1)))

    measure_ours(1, "log-normal", prompts, project, target, state, "Q", keep)
    line = measure_ours(32, "log-normal", prompts, project, target, state, "Q", compare)
    for residual_id, of_all in cosines.items():
        quantiles = np.quantile(np.concatenate(of_all), (0, 0.001, 0.01, 0.5))
        say(f"    residual {residual_id}: least, 0.1 %, 1 % and median cosine {', '.join(f'{q:.7f}' for q in quantiles)}")
    say(f"    {np.mean(equal):.1%} of {len(equal):,} rows are equal bit for bit")
    return line


def _many(prompts: list[Prompt], project: Project, target: Target, state: ServerState) -> Measurement:
    seen, memory = set(), {}
    server = psutil.Process(state.pid)

    def look(captured: Captured) -> None:
        seen.add((captured.files.rid, CommitRecord.read(captured.files.commit).rid))
        if len(seen) in (len(prompts) // 2, len(prompts)):
            memory[len(seen)] = anonymous_bytes(server)

    line = measure_ours(64, "equal 64", prompts, project, target, state, "M", look)
    left = list(Spool(Path(state.spool)).dumps.iterdir())
    rids = {rid for pair in seen for rid in pair}
    say(f"    {len(seen):,} commit records, {len(rids):,} ids, {len(left)} files left in the spool, server memory {memory} bytes")
    if not len(prompts) == len(seen) == len(rids) or left:
        raise SystemExit("dumps are missing, or left over")
    return line


def _pipeline(prompts: list[Prompt], project: Project, target: Target, state: ServerState, runs: int, rows: int) -> Measurement:
    """Everything up to published samples, as Dagster's runs do it: some partitions at once, each in its own process."""
    options = prompt_options(sources(project)[0], limits_of(project.settings.prompts, target.facts), None)
    tokenizer = hash_files(target.facts.path, with_code=False)
    template = hash_of_template((target.facts.path / "chat_template.jinja").read_text())
    keys = []
    for start in range(0, len(prompts), rows):
        key = f"benchmark-{len(keys):05d}"
        made = [dataclasses.replace(prompt, row=row) for row, prompt in enumerate(prompts[start : start + rows])]
        lines = tuple(PromptRow(sample_id(key, one.row), one.row, start + one.row, one.token_sha256, one) for one in made)
        partition = PromptPartition(key, "0" * 16, sources(project)[0], template, tokenizer, lines, options)
        write_partition(partition, project.home.prompts)
        keys.append(key)
    server = psutil.Process(state.pid)
    before, began = cpu_seconds(server), time.monotonic()
    with ProcessPoolExecutor(runs, mp_context=multiprocessing.get_context("spawn")) as pool:
        seconds = list(pool.map(_extract, [project.home.root] * len(keys), keys))
    wall = time.monotonic() - began
    busy = {name: round(sum(one[name] for one in seconds), 1) for name in seconds[0]}
    view = open_store(project.store_path).layer_set(target.layer_set.id)
    size = target.layout.row_bytes * sum(sample.tokens for _, sample in view.entries)
    say(f"    {len(view)} samples of {len(keys)} partitions in {runs} processes, {size:,} bytes; their seconds: {busy}")
    if len(view) != len(prompts):
        raise SystemExit("samples are missing")
    tokens = sum(len(prompt.input_ids) for prompt in prompts)
    return Measurement("P", runs, "equal", len(prompts), tokens, wall, size, cpu_seconds(server) - before)


def _extract(home: Path, key: str) -> dict[str, float]:
    """One partition in a process of its own: wall seconds, and CPU seconds in its own code and in the kernel's."""
    project = load_project(home)
    began, before = time.monotonic(), os.times()
    report = extract(project, resolve(project), key, "benchmark", lambda _: None)
    if report.problems:
        raise SystemExit("; ".join(report.problems))
    user, system = (now - then for now, then in zip(os.times()[:2], before[:2], strict=True))
    return {"wall": time.monotonic() - began, "capture": report.seconds, "user": user, "system": system}


def _defaults(target: Target, arguments: argparse.Namespace) -> list[str]:
    """SGLang's own defaults, but for what the machine needs."""
    argv = [*target.argv[:3], "--model-path", str(target.facts.path), "--host", "127.0.0.1", "--dtype", target.spec.dtype]
    needed = arguments.machine_args.split() if arguments.python else FLAGS
    if not arguments.python:  # the CPU engine dies on a prompt that is cached whole, and on an empty one to warm up
        needed = (*needed, "--disable-radix-cache", "--skip-server-warmup")
    return [*argv, "--tp-size", str(arguments.tensor_parallel), *needed]


def _old_plugin(root: Path, target: Target, spool: str) -> dict[str, str]:
    """Environment that loads the replaced scripts into a server, through an entry point of their own."""
    old = make_plugin(root / "old", Path(__file__).with_name("replaced_scripts.py"))
    plugin = expose_plugin(root / "plugin")  # for the CPU engine's second plugin; capture stays inert
    path = os.pathsep.join(filter(None, [old, str(plugin), target.env.get("PYTHONPATH")]))
    layers = ",".join(str(i) for i in target.layer_set.aux)
    return {"PYTHONPATH": path, "BENCHMARK_OLD_SPOOL": spool, "BENCHMARK_LAYERS": layers}


def project_of(root: Path, arguments: argparse.Namespace) -> Project:
    """A project in `root` for the model and server that the arguments describe."""
    source = root / "benchmark.jsonl"
    source.touch()
    machine_args = ", ".join(f'"{word}"' for word in arguments.machine_args.split())
    path = arguments.plugin or os.environ.get("PYTHONPATH") if arguments.python or arguments.plugin else None
    if arguments.unproven:
        os.environ["BENCHMARK_UNPROVEN"] = arguments.unproven
        path = os.pathsep.join(filter(None, [make_plugin(root / "unproven", Path(__file__).with_name("unproven.py")), path]))
    env = f'env = {{ PYTHONPATH = "{path}" }}\n' if path else ""
    budget = f"spool_bytes = {int(arguments.spool_gib * 2**30)}\n" if arguments.spool_gib else ""
    lines = [
        f"layers = [{arguments.layers}]",
        f'[model]\npath = "{arguments.model.absolute()}"',
        f'[[prompts.sources]]\npath = "{source}"',
        f'[server]\npython = "{arguments.python}"\ntensor_parallel = {arguments.tensor_parallel}\ndtype = "{arguments.dtype}"',
        f"chunk_tokens = {arguments.chunk_tokens}\nwriters = {arguments.writers}\nargs = [{machine_args}]",
        env + budget,
        f'[store]\npath = "{arguments.store}"' if arguments.store else "",
    ]
    (root / "hs_assets.toml").write_text("\n".join(lines))
    return load_project(root)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default="", help="SGLang's interpreter; empty for the CPU engine")
    parser.add_argument("--variants", default="A,defaults,B,C,E,D,S,V,Q,M,P")
    parser.add_argument("--in-flight", default="1,8,32")
    parser.add_argument("--lengths", default="equal,log-normal")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the equal prompts")
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement of A and D, about")
    parser.add_argument("--guess", type=float, default=1000, help="tokens/s, where A is not measured")
    parser.add_argument("--repeats", type=int, default=1, help="of A and D, in turn")
    parser.add_argument("--runs", type=int, default=4, help="of P, at once")
    parser.add_argument("--partition-rows", type=int, default=64, help="of P")
    parser.add_argument("--rows", type=int, default=120_000, help="of V")
    parser.add_argument("--many", type=int, default=10_000, help="prompts of M")
    parser.add_argument("--layers", default="1, 3, 5")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--spool-gib", type=float, default=0)
    parser.add_argument("--machine-args", default="", help="more arguments of launch_server, for all variants")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--store", default="", help="where P stores; under a temporary folder by default")
    parser.add_argument("--unproven", default="", help="a model class to capture from though it has not passed parity")
    parser.set_defaults(plugin="")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.current_thread().name = "benchmark"
    main()
