"""Three prompts at once that prove a fresh server, one of them longer than a chunk, before anybody relies on it.

Checked: a row for every token, the ids echoed, the `logprob` rule, equal rows on every rank, and auxiliary states equal
to those that an independent hook saw at the layers' input norms.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from hs_assets.errors import HandshakeError, WireError
from hs_assets.samples.eagle3 import CapturedSample, load_sample
from hs_assets.samples.model import CONTEXT_MARGIN, Head, load_head, read_model_facts
from hs_assets.samples.prompts import Prompt
from hs_assets.samples.rules import (
    Expected,
    Violation,
    coverage,
    finite,
    layer_ids,
    logprob_difference,
    shape,
    token_echo,
)
from hs_assets.serving.client import ask
from hs_assets.serving.state import LaunchPlan, ServerState
from hs_assets.wire.records import AnswerRecord, CommitRecord, FailureRecord, ReadyRecord
from hs_assets.wire.rid import Kind, new_rid
from hs_assets.wire.spool import DumpFiles, Spool

_LENGTHS = (17, 96)
_ABOVE_FUSION = 2100
"""SGLang fuses the all-reduce of up to 2048 tokens with the next norm: one prompt has more, where chunks allow it."""
_REQUEST_SECONDS = 600.0
_POLL_SECONDS = 0.005
_PROBE_TOLERANCE = 1e-2
"""Of the largest state: the probe and SGLang's own capture round the same sum."""


def run_canary(plan: LaunchPlan, state: ServerState, ready: list[ReadyRecord]) -> str:
    """Prove a server; returns a sentence on what was seen.

    Raises:
        HandshakeError: something does not hold; it names the check.
    """
    began = time.monotonic()
    prompts = _prompts(ready[0])
    spool = Spool(Path(plan.spool))
    with httpx.Client(timeout=_REQUEST_SECONDS, trust_env=False) as http, ThreadPoolExecutor(len(prompts)) as pool:
        samples = list(pool.map(lambda prompt: _one(prompt, plan, state, spool, http), prompts))
    head = load_head(read_model_facts(Path(plan.model_path)))
    expected = Expected(plan.residual_ids, plan.hidden_size, plan.dtype, head, plan.logprob_tolerance, 0, 0)
    for sample in samples:
        for rule in (token_echo, shape, coverage, layer_ids, finite):
            if violation := rule(sample, expected):
                raise _failed(violation)
    if isinstance(head, str):
        seen = f"logprob not applicable: {head}"
    else:
        seen = _check_logprobs(samples, head, expected.logprob_tolerance)
    for path in spool.canary.glob("*/*"):
        path.unlink(missing_ok=True)
    lengths = ", ".join(str(len(sample.token_ids)) for sample in samples)
    return f"canary of {lengths} tokens passed on {plan.world_size} rank(s) in {time.monotonic() - began:.1f} s; {seen}"


def _prompts(ready: ReadyRecord) -> list[Prompt]:
    """Random ids away from the ends of the vocabulary, where special tokens live."""
    chunk = ready.chunk_tokens
    longest = chunk + chunk // 2 if chunk else _ABOVE_FUSION
    lengths = [*_LENGTHS, min(longest, ready.context_length - CONTEXT_MARGIN)]
    random = np.random.default_rng(0)
    low, high = ready.vocab_size // 8, ready.vocab_size * 3 // 4
    return [Prompt.supervised(row, random.integers(low, high, length)) for row, length in enumerate(lengths)]


def _one(prompt: Prompt, plan: LaunchPlan, state: ServerState, spool: Spool, http: httpx.Client) -> CapturedSample:
    """Send one prompt, and return what rank 0 captured after comparing it with the other ranks and with the probes."""
    rid = str(new_rid("canary", prompt.row, len(prompt.input_ids), Kind.CANARY))
    answer = ask(http, state.url, rid, prompt.input_ids.tolist())
    states: list[CapturedSample] = []
    for rank in range(plan.world_size):
        files = spool.canary_dump(rank, rid)
        sample = _load(prompt, files, answer, plan.commit_timeout_seconds)
        probe = _load(prompt, DumpFiles(files.folder, f"{rid}.probe"), answer, plan.commit_timeout_seconds)
        _compare_probe(sample, probe, rank)
        states.append(sample)
    _compare_ranks(states)
    return states[0]


def _compare_ranks(states: list[CapturedSample]) -> None:
    for rank, sample in enumerate(states):
        if sample.commit.row_checksums_crc32 != states[0].commit.row_checksums_crc32:
            difference = np.abs(sample.states.astype(np.float32) - states[0].states.astype(np.float32)).max()
            raise _failed(
                Violation(
                    "equal_ranks", f"rank {rank} differs from rank 0 by up to {difference:.3g} on {len(sample.token_ids)} tokens"
                )
            )


def _load(prompt: Prompt, files: DumpFiles, answer: AnswerRecord, seconds: float) -> CapturedSample:
    outcome = _wait_for_commit(files, seconds)
    if isinstance(outcome, FailureRecord):
        raise _failed(Violation(outcome.reason, outcome.detail))
    dataclasses.replace(answer, rid=files.rid).write(files.answer)  # one answer, for the dump and its probe
    return load_sample(prompt, files)


def _wait_for_commit(files: DumpFiles, seconds: float) -> CommitRecord | FailureRecord:
    """What the server says of a dump; it may come a little after the HTTP answer.

    Raises:
        WireError: nothing came in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        if files.commit.exists():
            return CommitRecord.read(files.commit)
        if files.failure.exists():
            return FailureRecord.read(files.failure)
        if time.monotonic() > deadline:
            raise WireError(
                "the server answered, but left no dump",
                where=files.rid,
                expected=f"a commit record within {seconds:.0f} s",
                remedy="see the server's log",
            )
        time.sleep(_POLL_SECONDS)


def _compare_probe(sample: CapturedSample, probe: CapturedSample, rank: int) -> None:
    for residual_id in probe.commit.residual_ids:
        ours, theirs = sample.residual(residual_id).astype(np.float32), probe.residual(residual_id).astype(np.float32)
        difference, largest = np.abs(ours - theirs).max(), np.abs(theirs).max()
        if not difference <= _PROBE_TOLERANCE * largest:
            raise _failed(
                Violation(
                    "probe",
                    f"rank {rank}, residual id {residual_id}: differs by {difference:.3g} where states reach {largest:.3g}",
                )
            )


def _check_logprobs(samples: list[CapturedSample], head: Head, tolerance: float) -> str:
    """The rule on each sample, and how far another sample's state would have been."""
    own = [logprob_difference(sample, head) for sample in samples]
    others = [*samples[1:], samples[0]]
    swapped = [logprob_difference(one, head, other.states[-1, -1]) for one, other in zip(samples, others, strict=True)]
    if max(own) > tolerance:
        raise _failed(Violation("logprob", f"centred logprobs differ by {max(own):.3f}, more than {tolerance}"))
    return f"logprob difference at most {max(own):.3f}, of another prompt's state at least {min(swapped):.3f}"


def _failed(violation: Violation) -> HandshakeError:
    return HandshakeError(
        f"the canary failed on {violation.rule}",
        got=violation.detail,
        remedy="the server's states are not to be trusted: see its log",
    )
