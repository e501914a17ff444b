"""What must hold for every sample. A rule is a pure function that returns a `Violation`, or None where it holds.

Each rule's name shows in the ledger: `token_echo`, `shape`, `coverage`, `layer_ids`, `supervised`, `finite`, `logprob`,
`shared_prefix`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hs_assets.samples.eagle3 import CapturedSample
from hs_assets.samples.model import Head

NOT_APPLICABLE = "not_applicable"
_MIN_PREFIX_ROWS = 8
_MAX_PREFIX_ROWS = 256
_MAX_REFERENCES = 8
_BLOCK_ROWS = 32
"""Rows that are looked at together: what is made of them stays in the cache."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that does not hold, and what was seen."""

    rule: str
    detail: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What was asked of the server. ``head`` may be a sentence that says why there is none to check against."""

    residual_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    head: Head | str
    logprob_tolerance: float
    prefix_cosine: float
    prefix_share: float


def token_echo(sample: CapturedSample, _: Expected) -> Violation | None:
    """The server computed exactly the ids that were sent."""
    sent, seen = sample.prompt.input_ids, sample.token_ids
    if len(sent) != len(seen):
        return Violation("token_echo", f"{len(sent)} ids were sent, the server saw {len(seen)}")
    differs = np.flatnonzero(sent != seen)
    return (
        Violation("token_echo", f"id {sent[differs[0]]} was sent at {differs[0]}, the server saw {seen[differs[0]]}")
        if len(differs)
        else None
    )


def shape(sample: CapturedSample, expected: Expected) -> Violation | None:
    """Slots, hidden size and dtype are those that were asked for."""
    wanted = (len(expected.residual_ids), expected.hidden_size, expected.dtype)
    got = (*sample.states.shape[1:], sample.commit.dtype)
    return None if got == wanted else Violation("shape", f"slots, hidden size, dtype are {got}, not {wanted}")


def coverage(sample: CapturedSample, _: Expected) -> Violation | None:
    """There is a row for every token, none from a cache."""
    tokens, rows = len(sample.prompt.input_ids), sample.states.shape[0]
    if rows != tokens or sample.answer.prompt_tokens != tokens:
        return Violation("coverage", f"{rows} rows for {tokens} tokens; the server counted {sample.answer.prompt_tokens}")
    return (
        Violation("coverage", f"{sample.answer.cached_tokens} tokens came from a cache") if sample.answer.cached_tokens else None
    )


def layer_ids(sample: CapturedSample, expected: Expected) -> Violation | None:
    """The slots are the residual ids that were asked for, in their order."""
    got = sample.commit.residual_ids
    return None if got == expected.residual_ids else Violation("layer_ids", f"slots are {got}, not {expected.residual_ids}")


def supervised(sample: CapturedSample, _: Expected) -> Violation | None:
    """Some token is supervised."""
    return None if sample.prompt.loss_mask.any() else Violation("supervised", "no token is supervised")


def finite(sample: CapturedSample, _: Expected) -> Violation | None:
    """No state is NaN or infinite; names slot and token of the first one."""
    bits = np.dtype(np.uint32 if sample.states.itemsize == 4 else np.uint16)
    exponent = np.array({"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[sample.commit.dtype], bits)
    states = sample.states.view(bits)
    blocks = (states[row : row + _BLOCK_ROWS] & exponent for row in range(0, len(states), _BLOCK_ROWS))
    if all(block.max() != exponent for block in blocks):
        return None
    bad = (states & exponent) == exponent
    token, slot, _element = np.argwhere(bad)[0]
    return Violation("finite", f"{int(bad.sum())} values are NaN or infinite, the first at token {token}, slot {slot}")


def logprob_difference(sample: CapturedSample, head: Head, state: np.ndarray | None = None) -> float:
    """Largest difference of the centred logprobs of the likeliest next tokens: ours from a final state, and the server's.

    Centring takes out the unknown normaliser.

    Arguments:
        state: final state [H]; by default the sample's own last one.
    """
    theirs = np.array([logprob for logprob, _ in sample.answer.top_logprobs], np.float32)
    ids = np.array([token for _, token in sample.answer.top_logprobs], np.int64)
    ours = head.logits(sample.states[-1, -1] if state is None else state, ids)
    return float(np.abs((ours - ours.mean()) - (theirs - theirs.mean())).max())


def logprob(sample: CapturedSample, expected: Expected) -> Violation | str | None:
    """The last final state reproduces the server's own logprobs: the right layer, norm, alignment and sample."""
    if isinstance(expected.head, str):
        return NOT_APPLICABLE
    ids = [token for _, token in sample.answer.top_logprobs]
    if len(ids) < 2 or not all(0 <= token < expected.head.vocab_size for token in ids):
        return Violation("logprob", f"the server gave {len(ids)} logprobs, for ids {ids} of {expected.head.vocab_size}")
    difference = logprob_difference(sample, expected.head)
    if difference <= expected.logprob_tolerance:
        return None
    return Violation("logprob", f"centred logprobs differ by {difference:.3f}, more than {expected.logprob_tolerance}")


RULES = (token_echo, shape, coverage, layer_ids, supervised, finite, logprob)
"""Rules of one sample alone, in the order in which they can be applied."""


@dataclass(slots=True)
class SharedPrefix:
    """Samples that begin with the same tokens carry the same states there, because prefill is causal.

    Keeps the beginnings of a few samples that passed. bf16 and MoE routing change single rows between batches, so it
    looks at the share of rows whose cosine is high in every slot.
    """

    expected: Expected
    rows_compared: int = 0
    _references: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def check(self, sample: CapturedSample) -> Violation | str | None:
        """Compare with the reference that shares the longest beginning; none is not applicable."""
        ids = sample.token_ids[:_MAX_PREFIX_ROWS]
        common, states = max(
            ((_common(ids, known), states) for known, states in self._references), key=lambda pair: pair[0], default=(0, ids)
        )
        if common < _MIN_PREFIX_ROWS:
            self._remember(sample)
            return NOT_APPLICABLE
        ours, theirs = _float(sample.states[:common]), _float(states[:common])
        good = (_cosine(ours, theirs) >= self.expected.prefix_cosine).all(axis=1)
        self.rows_compared += common
        if good.mean() >= self.expected.prefix_share:
            return None
        return Violation(
            "shared_prefix", f"only {int(good.sum())} of {common} rows of a common beginning agree with another sample's"
        )

    def _remember(self, sample: CapturedSample) -> None:
        if len(self._references) < _MAX_REFERENCES:
            self._references.append((sample.token_ids[:_MAX_PREFIX_ROWS].copy(), sample.states[:_MAX_PREFIX_ROWS].copy()))


@dataclass(slots=True)
class Validator:
    """Applies all rules to the samples of a partition, and counts: ``counts[rule]["passed"]``, ``failed``, ``not_applicable``."""

    expected: Expected
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    worst_logprob: float = 0.0
    """Largest difference of a sample's own state: below the tolerance."""
    nearest_logprob: float = float("inf")
    """Smallest difference of another sample's state, the one before: how far the tolerance is from a mix-up."""
    shared_prefix: SharedPrefix = field(init=False)
    _last_state: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.shared_prefix = SharedPrefix(self.expected)

    def check(self, sample: CapturedSample) -> Violation | None:
        """The first rule that does not hold for `sample`, if any."""
        for rule in RULES:
            if violation := self._count(rule.__name__, rule(sample, self.expected)):
                return violation
        violation = self._count("shared_prefix", self.shared_prefix.check(sample))
        if violation is None and not isinstance(self.expected.head, str):
            self._measure(sample, self.expected.head)
        return violation

    def _measure(self, sample: CapturedSample, head: Head) -> None:
        self.worst_logprob = max(self.worst_logprob, logprob_difference(sample, head))
        if self._last_state is not None:
            other = logprob_difference(sample, head, self._last_state)
            self.nearest_logprob = min(self.nearest_logprob, other)
        self._last_state = sample.states[-1, -1].copy()

    def _count(self, rule: str, outcome: Violation | str | None) -> Violation | None:
        seen = self.counts.setdefault(rule, Counter())
        if isinstance(outcome, Violation):
            seen["failed"] += 1
            return outcome
        seen["passed" if outcome is None else NOT_APPLICABLE] += 1
        return None


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common beginning of two id arrays."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _float(states: np.ndarray) -> np.ndarray:
    return states.astype(np.float32)


def _cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Cosine along the last axis; 1 where both are zero, 0 where one is."""
    ours, theirs = np.linalg.norm(one, axis=-1), np.linalg.norm(other, axis=-1)
    cosine = (one * other).sum(axis=-1) / np.maximum(ours * theirs, np.finfo(np.float32).tiny)
    return np.where((ours == 0) & (theirs == 0), 1.0, cosine)
