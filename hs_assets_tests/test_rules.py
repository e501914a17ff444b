"""Each rule passes on a good sample and fails on every fault it exists for; what cannot be checked is not counted as passed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hs_assets.samples import rules
from hs_assets.samples.eagle3 import CapturedSample
from hs_assets.samples.model import Head, load_head, read_model_facts
from hs_assets.samples.prompts import Prompt
from hs_assets.samples.rules import NOT_APPLICABLE, RULES, Expected, SharedPrefix, Validator, Violation
from hs_assets.wire.dump import token_sha256
from hs_assets.wire.records import AnswerRecord, CommitRecord

RESIDUAL_IDS, HIDDEN, VOCABULARY, TOKENS, TOP = (1, 2, 4), 64, 300, 24, 20
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
EPS, TOLERANCE = 1e-5, 0.25

_random = np.random.default_rng(11)
NORM = _random.normal(1, 0.5, HIDDEN).astype(ml_dtypes.bfloat16)
MATRIX = _random.normal(0, 0.4, (VOCABULARY, HIDDEN)).astype(ml_dtypes.bfloat16)
EMBEDDINGS = _random.normal(0, 0.4, (VOCABULARY, HIDDEN)).astype(ml_dtypes.bfloat16)
HEAD = Head(NORM.astype(np.float32), EPS, None, 1.0, MATRIX)
EXPECTED = Expected(RESIDUAL_IDS, HIDDEN, "BF16", HEAD, TOLERANCE, prefix_cosine=0.99, prefix_share=0.5)


def top_logprobs(
    state: np.ndarray, matrix: np.ndarray = MATRIX, softcap: float | None = None, scale: float = 1.0
) -> tuple[tuple[float, int], ...]:
    """What a server answers for a final state [H]: the 20 likeliest ids, in float64, with the noise of bf16 arithmetic."""
    x = state.astype(np.float64)
    normed = x / np.sqrt((x**2).mean() + EPS) * NORM.astype(np.float64)
    logits = matrix.astype(np.float64) @ normed * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    noise = np.random.default_rng(3).uniform(-0.03, 0.03, VOCABULARY)
    return tuple((float(logprobs[i] + noise[i]), int(i)) for i in np.argsort(-logprobs)[:TOP])


def make_ids(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype("<i4")


def make_states(seed: int, tokens: int = TOKENS, dtype: str = "BF16") -> np.ndarray:
    """States [T, K+1, H] that grow from slot to slot, as a residual stream does."""
    steps = np.random.default_rng(seed).normal(0, 4, (tokens, len(RESIDUAL_IDS), HIDDEN))
    return steps.cumsum(axis=1).astype(DTYPES[dtype])


def make_sample(
    seed: int = 0, *, ids: np.ndarray | None = None, states: np.ndarray | None = None, dtype: str = "BF16"
) -> CapturedSample:
    """A good sample: everything in it belongs together."""
    ids = make_ids(seed) if ids is None else ids
    states = make_states(seed, len(ids), dtype) if states is None else states
    rid, digest = f"hs.s.00000000.demo-00003.{seed:04d}.T{len(ids)}", token_sha256(ids.tobytes())
    commit = CommitRecord(
        rid=rid,
        server="server-1",
        state_fingerprint="fingerprint-1",
        residual_ids=RESIDUAL_IDS,
        tokens=len(ids),
        hidden_size=HIDDEN,
        dtype=dtype,
        bytes=0,
        row_checksums_crc32=0,
        token_sha256=digest,
        chunks=1,
        committed_at=time.time(),
    )
    answer = AnswerRecord(rid, len(ids), 0, top_logprobs(states[-1, -1]) if len(states) else ())
    mask = np.arange(len(ids)) >= len(ids) // 2
    return CapturedSample(Prompt(seed, ids, mask, digest), commit, answer, ids.copy(), states)


def with_answer(sample: CapturedSample, **fields: Any) -> CapturedSample:
    return dataclasses.replace(sample, answer=dataclasses.replace(sample.answer, **fields))


def with_commit(sample: CapturedSample, **fields: Any) -> CapturedSample:
    return dataclasses.replace(sample, commit=dataclasses.replace(sample.commit, **fields))


def with_states(sample: CapturedSample, states: np.ndarray) -> CapturedSample:
    return dataclasses.replace(sample, states=states)


def violation(outcome: object, rule: str) -> str:
    """The detail of a violation of this rule."""
    assert isinstance(outcome, Violation), outcome
    assert outcome.rule == rule
    assert outcome.detail
    return outcome.detail


# A good sample


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_sample_passes_every_rule(rule: Callable[..., object], dtype: str) -> None:
    assert rule(make_sample(dtype=dtype), dataclasses.replace(EXPECTED, dtype=dtype)) is None


def test_a_sample_of_one_token_passes_every_rule() -> None:
    sample = make_sample(ids=make_ids(0, 1))
    assert [rule(sample, EXPECTED) for rule in RULES] == [None] * len(RULES)


def test_the_names_of_the_rules() -> None:
    assert [rule.__name__ for rule in RULES] == [
        "token_echo",
        "shape",
        "coverage",
        "layer_ids",
        "supervised",
        "finite",
        "logprob",
    ]


# token_echo


@pytest.mark.parametrize("place", [0, 7, TOKENS - 1])
def test_token_echo_of_another_id(place: int) -> None:
    sample = make_sample()
    sample.token_ids[place] += 1
    detail = violation(rules.token_echo(sample, EXPECTED), "token_echo")
    assert f"sent at {place}" in detail
    assert str(sample.token_ids[place]) in detail


@pytest.mark.parametrize("tokens", [0, TOKENS - 1, TOKENS + 1])
def test_token_echo_of_another_length(tokens: int) -> None:
    """One less is what a server does that drops BOS; one more what one does that adds it."""
    sample = make_sample()
    echoed = np.resize(sample.token_ids, tokens)
    detail = violation(rules.token_echo(dataclasses.replace(sample, token_ids=echoed), EXPECTED), "token_echo")
    assert str(TOKENS) in detail
    assert str(tokens) in detail


# shape


@pytest.mark.parametrize(
    "states",
    [
        make_states(0)[:, :2],
        make_states(0)[:, [0, 1, 2, 2]],
        make_states(0)[:, :, : HIDDEN // 2],
        np.concatenate([make_states(0)] * 2, axis=2),
    ],
    ids=["a slot less", "a slot more", "half the hidden size", "twice the hidden size"],
)
def test_shape_of_the_states(states: np.ndarray) -> None:
    violation(rules.shape(with_states(make_sample(), states), EXPECTED), "shape")


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_shape_says_the_dtype(dtype: str) -> None:
    detail = violation(rules.shape(make_sample(dtype=dtype), EXPECTED), "shape")
    assert dtype in detail
    assert "BF16" in detail


# coverage


@pytest.mark.parametrize("rows", [0, 1, TOKENS - 1, TOKENS + 1])
def test_coverage_of_the_rows(rows: int) -> None:
    sample = with_states(make_sample(), np.resize(make_states(0), (rows, len(RESIDUAL_IDS), HIDDEN)))
    assert f"{rows} rows for {TOKENS} tokens" in violation(rules.coverage(sample, EXPECTED), "coverage")


@pytest.mark.parametrize("counted", [0, TOKENS - 1, TOKENS + 1])
def test_coverage_of_what_the_server_counted(counted: int) -> None:
    violation(rules.coverage(with_answer(make_sample(), prompt_tokens=counted), EXPECTED), "coverage")


@pytest.mark.parametrize("cached", [1, TOKENS - 1])
def test_coverage_of_tokens_from_a_cache(cached: int) -> None:
    detail = violation(rules.coverage(with_answer(make_sample(), cached_tokens=cached), EXPECTED), "coverage")
    assert f"{cached} tokens came from a cache" in detail


# layer_ids


@pytest.mark.parametrize("ids", [(2, 1, 4), (1, 4, 2), (0, 1, 4), (1, 2, 3), (1, 2), (1, 2, 3, 4)])
def test_layer_ids_others_or_in_another_order(ids: tuple[int, ...]) -> None:
    assert str(ids) in violation(rules.layer_ids(with_commit(make_sample(), residual_ids=ids), EXPECTED), "layer_ids")


# supervised


def test_supervised_by_no_token() -> None:
    sample = make_sample()
    prompt = dataclasses.replace(sample.prompt, loss_mask=np.zeros(TOKENS, bool))
    violation(rules.supervised(dataclasses.replace(sample, prompt=prompt), EXPECTED), "supervised")


# finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_finite_names_token_and_slot(value: float, dtype: str) -> None:
    sample = make_sample(dtype=dtype)
    sample.states[7, 1, 5] = value
    detail = violation(rules.finite(sample, EXPECTED), "finite")
    assert "token 7, slot 1" in detail
    assert detail.startswith("1 values")


def test_finite_names_the_first_of_many() -> None:
    sample = make_sample()
    sample.states[9, 0, 0] = np.nan
    sample.states[3, 2, HIDDEN - 1] = np.inf
    sample.states[3, 2, 0] = np.inf
    detail = violation(rules.finite(sample, EXPECTED), "finite")
    assert "token 3, slot 2" in detail
    assert detail.startswith("3 values")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, 95, 96, 99])
def test_finite_wherever_the_token_is(token: int, value: float) -> None:
    """Rows are looked at some at a time: the first, the last and those at the edges of what is looked at together."""
    sample = make_sample(ids=make_ids(0, 100))
    assert rules.finite(sample, EXPECTED) is None
    sample.states[token, 2, HIDDEN - 1] = value
    assert f"token {token}, slot 2" in violation(rules.finite(sample, EXPECTED), "finite")


def test_finite_where_a_whole_row_is_infinite() -> None:
    sample = make_sample()
    sample.states[7, 1] = np.inf
    detail = violation(rules.finite(sample, EXPECTED), "finite")
    assert "token 7, slot 1" in detail
    assert detail.startswith(f"{HIDDEN} values")


def test_finite_where_bf16_overflows() -> None:
    """The largest float32 is beyond the largest bf16."""
    with np.errstate(over="ignore"):
        rounded = np.full((1,), np.finfo(np.float32).max, np.float32).astype(ml_dtypes.bfloat16)
    sample = make_sample()
    sample.states[7, 1, 0] = rounded[0]
    assert "token 7, slot 1" in violation(rules.finite(sample, EXPECTED), "finite")


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_for_the_largest_and_the_smallest_numbers(dtype: str) -> None:
    sample, facts = make_sample(dtype=dtype), ml_dtypes.finfo(DTYPES[dtype])
    sample.states[0, 0, :5] = [facts.max, facts.min, facts.smallest_subnormal, -0.0, facts.smallest_normal]
    assert rules.finite(sample, EXPECTED) is None


# logprob


def test_logprob_of_the_true_state() -> None:
    for seed in range(20):
        sample = make_sample(seed)
        assert rules.logprob(sample, EXPECTED) is None
        assert rules.logprob_difference(sample, HEAD) < 0.13


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprob_in_every_dtype(dtype: str) -> None:
    assert rules.logprob(make_sample(dtype=dtype), EXPECTED) is None


def test_logprob_does_not_depend_on_the_normaliser() -> None:
    """A server that gives logits, or logprobs at another temperature's sum, shifts them all alike."""
    sample = make_sample()
    shifted = tuple((logprob + 5, token) for logprob, token in sample.answer.top_logprobs)
    assert rules.logprob(with_answer(sample, top_logprobs=shifted), EXPECTED) is None


def put_last(sample: CapturedSample, state: np.ndarray) -> CapturedSample:
    """The sample with another final state of its last token."""
    states = sample.states.copy()
    states[-1, -1] = state
    return with_states(sample, states)


def post_norm(sample: CapturedSample) -> CapturedSample:
    x = sample.states[-1, -1].astype(np.float64)
    return put_last(sample, x / np.sqrt((x**2).mean() + EPS) * NORM.astype(np.float64))


FAULTS: dict[str, Callable[[CapturedSample], CapturedSample]] = {
    "another sample's states": lambda sample: with_states(sample, make_states(99)),
    "another sample's answer": lambda sample: with_answer(sample, top_logprobs=make_sample(98).answer.top_logprobs),
    "post-norm": post_norm,
    "the layer before": lambda sample: put_last(sample, sample.states[-1, -2]),
    "slots turned around": lambda sample: with_states(sample, sample.states[:, ::-1]),
    "the token before": lambda sample: put_last(sample, sample.states[-2, -1]),
    "shifted by one row": lambda sample: with_states(sample, np.roll(sample.states, 1, axis=0)),
    "zeros": lambda sample: put_last(sample, np.zeros(HIDDEN)),
    "half of the hidden size": lambda sample: put_last(
        sample, np.concatenate([sample.states[-1, -1, : HIDDEN // 2], np.zeros(HIDDEN // 2)])
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_logprob_of_another_state(fault: Callable[[CapturedSample], CapturedSample]) -> None:
    for seed in range(20):
        sample = fault(make_sample(seed))
        assert "centred logprobs differ by" in violation(rules.logprob(sample, EXPECTED), "logprob")
        assert rules.logprob_difference(sample, HEAD) > 0.42


def test_logprob_does_not_see_a_common_factor() -> None:
    """RMSNorm takes a factor out: a state of twice the length gives the same logits."""
    sample = make_sample()
    assert rules.logprob(put_last(sample, sample.states[-1, -1] * 2), EXPECTED) is None


def test_logprob_keeps_to_the_tolerance() -> None:
    sample = make_sample()
    logprobs = [list(pair) for pair in sample.answer.top_logprobs]
    logprobs[4][0] += 1
    sample = with_answer(sample, top_logprobs=tuple((float(a), int(b)) for a, b in logprobs))
    difference = rules.logprob_difference(sample, HEAD)
    assert 0.9 < difference < 1.1
    assert rules.logprob(sample, dataclasses.replace(EXPECTED, logprob_tolerance=difference + 1e-3)) is None
    violation(rules.logprob(sample, dataclasses.replace(EXPECTED, logprob_tolerance=difference - 1e-3)), "logprob")


@pytest.mark.parametrize("given", [(), ((-0.1, 5),)])
def test_logprob_of_too_few_tokens(given: tuple[tuple[float, int], ...]) -> None:
    detail = violation(rules.logprob(with_answer(make_sample(), top_logprobs=given), EXPECTED), "logprob")
    assert f"gave {len(given)} logprobs" in detail


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logprob_that_is_no_number(value: float) -> None:
    sample = make_sample()
    with np.errstate(invalid="ignore"):
        outcome = rules.logprob(with_answer(sample, top_logprobs=((value, 3), *sample.answer.top_logprobs)), EXPECTED)
    violation(outcome, "logprob")


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40])
def test_logprob_of_an_id_outside_the_head(token: int) -> None:
    """The sample fails; the run does not."""
    sample = make_sample()
    (logprob, _), *rest = sample.answer.top_logprobs
    violation(rules.logprob(with_answer(sample, top_logprobs=((logprob, token), *rest)), EXPECTED), "logprob")


def test_logprob_with_a_softcap() -> None:
    head = dataclasses.replace(HEAD, softcap=4.0)
    sample = make_sample()
    capped = with_answer(sample, top_logprobs=top_logprobs(sample.states[-1, -1], softcap=4.0))
    assert rules.logprob(capped, dataclasses.replace(EXPECTED, head=head)) is None
    violation(rules.logprob(capped, EXPECTED), "logprob")
    violation(rules.logprob(sample, dataclasses.replace(EXPECTED, head=head)), "logprob")


def test_logprob_with_a_scale() -> None:
    head = dataclasses.replace(HEAD, scale=0.25)
    sample = make_sample()
    scaled = with_answer(sample, top_logprobs=top_logprobs(sample.states[-1, -1], scale=0.25))
    assert rules.logprob(scaled, dataclasses.replace(EXPECTED, head=head)) is None
    violation(rules.logprob(scaled, EXPECTED), "logprob")


def write_model(folder: Path, tensors: dict[str, np.ndarray], **fields: Any) -> Head | str:
    """The head of a checkpoint on disk with these tensors."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return load_head(read_model_facts(folder))


TENSORS = {"model.norm.weight": NORM, "model.embed_tokens.weight": EMBEDDINGS, "lm_head.weight": MATRIX}


@pytest.mark.parametrize("tied", [False, True])
def test_logprob_with_the_head_of_a_checkpoint(tied: bool, tmp_path: Path) -> None:
    head = write_model(tmp_path, TENSORS, tie_word_embeddings=tied)
    sample = make_sample()
    by_matrix = sample
    by_embeddings = with_answer(sample, top_logprobs=top_logprobs(sample.states[-1, -1], EMBEDDINGS))
    right, wrong = (by_embeddings, by_matrix) if tied else (by_matrix, by_embeddings)
    expected = dataclasses.replace(EXPECTED, head=head)
    assert rules.logprob(right, expected) is None
    violation(rules.logprob(wrong, expected), "logprob")


UNCHECKED: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {
    "an unknown norm": (TENSORS, {"architectures": ["Gemma9ForCausalLM"]}),
    "a quantised head": ({**TENSORS, "lm_head.weight": MATRIX.astype(ml_dtypes.float8_e4m3fn)}, {}),
    "no head": ({"model.norm.weight": NORM}, {}),
}


@pytest.mark.parametrize(("tensors", "fields"), UNCHECKED.values(), ids=UNCHECKED.keys())
def test_logprob_that_cannot_be_checked_is_not_passed(
    tensors: dict[str, np.ndarray], fields: dict[str, Any], tmp_path: Path
) -> None:
    head = write_model(tmp_path, tensors, **fields)
    assert isinstance(head, str)
    expected = dataclasses.replace(EXPECTED, head=head)
    wrong = FAULTS["another sample's states"](make_sample())
    assert rules.logprob(make_sample(), expected) == rules.logprob(wrong, expected) == NOT_APPLICABLE
    validator = Validator(expected)
    assert validator.check(make_sample()) is None
    assert validator.counts["logprob"] == {NOT_APPLICABLE: 1}
    assert validator.counts["logprob"]["passed"] == 0
    assert validator.worst_logprob == 0


# shared_prefix


def sharing(common: int, seed: int, *, of: int = 1, tokens: int = TOKENS) -> CapturedSample:
    """A sample that begins with the first `common` tokens and states of sample `of`, and goes on in its own way."""
    ids, states = make_ids(seed, tokens), make_states(seed, tokens)
    first = make_sample(of)
    ids[:common], states[:common] = first.token_ids[:common], first.states[:common]
    if common < min(tokens, TOKENS):
        ids[common] = (first.token_ids[common] + 1) % VOCABULARY
    return make_sample(seed, ids=ids, states=states)


def check_pair(one: CapturedSample, other: CapturedSample) -> tuple[object, SharedPrefix]:
    """The outcome for the second of two samples."""
    rule = SharedPrefix(EXPECTED)
    assert rule.check(one) == NOT_APPLICABLE
    assert rule.rows_compared == 0
    return rule.check(other), rule


@pytest.mark.parametrize("common", [8, 12, TOKENS])
def test_shared_prefix_with_the_same_states(common: int) -> None:
    outcome, rule = check_pair(make_sample(1), sharing(common, 2))
    assert outcome is None
    assert rule.rows_compared == common


@pytest.mark.parametrize("common", [0, 1, 7])
def test_shared_prefix_too_short_to_say_anything(common: int) -> None:
    outcome, rule = check_pair(make_sample(1), sharing(common, 2))
    assert outcome == NOT_APPLICABLE
    assert rule.rows_compared == 0


def test_shared_prefix_of_a_shorter_sample() -> None:
    ids = make_ids(1)[:10]
    outcome, rule = check_pair(make_sample(1), make_sample(2, ids=ids, states=make_states(1)[:10]))
    assert outcome is None
    assert rule.rows_compared == 10


@pytest.mark.parametrize("by", [1, -1])
def test_shared_prefix_shifted_by_one_row(by: int) -> None:
    sample = sharing(16, 2)
    outcome, rule = check_pair(make_sample(1), with_states(sample, np.roll(sample.states, by, axis=0)))
    assert "of 16 rows" in violation(outcome, "shared_prefix")
    assert rule.rows_compared == 16


def test_shared_prefix_with_another_samples_states() -> None:
    outcome, _ = check_pair(make_sample(1), with_states(sharing(16, 2), make_states(3)))
    assert "only 0 of 16 rows" in violation(outcome, "shared_prefix")


@pytest.mark.parametrize("slot", range(len(RESIDUAL_IDS)))
def test_shared_prefix_with_one_wrong_slot(slot: int) -> None:
    sample = sharing(16, 2)
    states = sample.states.copy()
    states[:, slot] = make_states(3)[:, slot]
    outcome, _ = check_pair(make_sample(1), with_states(sample, states))
    assert "only 0 of 16 rows" in violation(outcome, "shared_prefix")


@pytest.mark.parametrize(("flipped", "passes"), [(1, True), (3, True), (8, True), (9, False), (16, False)])
def test_shared_prefix_with_some_other_rows(flipped: int, passes: bool) -> None:
    """Routing in bf16 turns single rows; more than the share that is allowed is a fault."""
    sample = sharing(16, 2)
    states = sample.states.copy()
    states[:flipped] = make_states(3)[:flipped]
    outcome, _ = check_pair(make_sample(1), with_states(sample, states))
    assert (outcome is None) is passes, outcome


def test_shared_prefix_with_the_noise_of_bf16() -> None:
    sample = sharing(16, 2)
    noise = np.random.default_rng(4).uniform(0.995, 1.005, sample.states.shape)
    outcome, _ = check_pair(make_sample(1), with_states(sample, (sample.states * noise).astype(ml_dtypes.bfloat16)))
    assert outcome is None


@pytest.mark.parametrize("slots", [[0], [0, 1, 2]], ids=["one slot", "all slots"])
@pytest.mark.parametrize("zeros_first", [True, False])
def test_shared_prefix_with_zeros_for_states(zeros_first: bool, slots: list[int]) -> None:
    """A slot that was never written is not the same as one that was."""
    one, other = make_sample(1), sharing(16, 2)
    empty = one if zeros_first else other
    states = empty.states.copy()
    states[:16, slots] = 0
    empty = with_states(empty, states)
    outcome, _ = check_pair(empty, other) if zeros_first else check_pair(one, empty)
    violation(outcome, "shared_prefix")


def test_shared_prefix_with_zeros_on_both_sides() -> None:
    zeros = np.zeros_like(make_states(0))
    outcome, _ = check_pair(with_states(make_sample(1), zeros), with_states(sharing(16, 2), zeros))
    assert outcome is None


def test_shared_prefix_takes_the_longest_beginning() -> None:
    """Of several references the one that says the most, and the right one."""
    rule = SharedPrefix(EXPECTED)
    assert rule.check(make_sample(1)) == NOT_APPLICABLE
    assert rule.check(make_sample(5)) == NOT_APPLICABLE
    assert rule.check(sharing(TOKENS, 6, of=5)) is None
    assert rule.check(sharing(10, 7, of=1)) is None
    assert rule.rows_compared == TOKENS + 10
    violation(rule.check(with_states(sharing(TOKENS, 8, of=5), make_states(1))), "shared_prefix")


def test_shared_prefix_of_long_prompts() -> None:
    """The beginnings are kept, not the prompts."""
    ids, states = make_ids(1, 1000), make_states(1, 1000)
    long = make_sample(1, ids=ids, states=states)
    outcome, rule = check_pair(long, long)
    assert outcome is None
    assert 200 <= rule.rows_compared <= 1000
    sizes = [kept.size for pair in rule._references for kept in pair]
    assert sum(sizes) < states.size / 2


def test_shared_prefix_keeps_its_own_copy() -> None:
    """A dump is freed after it was stored; its pages may be gone when the next sample comes."""
    one = make_sample(1)
    rule = SharedPrefix(EXPECTED)
    rule.check(one)
    one.states[:] = make_states(9)
    one.token_ids[:] = 0
    assert rule.check(sharing(16, 2)) is None
    assert rule.rows_compared == 16


# All of them


def test_validator_counts_every_rule() -> None:
    validator = Validator(EXPECTED)
    assert validator.check(make_sample(1)) is None
    assert validator.check(sharing(16, 2)) is None
    for rule in RULES:
        assert validator.counts[rule.__name__] == {"passed": 2}
    assert validator.counts["shared_prefix"] == {NOT_APPLICABLE: 1, "passed": 1}
    assert validator.shared_prefix.rows_compared == 16
    assert 0 < validator.worst_logprob < 0.13


def broken(rule: str) -> CapturedSample:
    sample = make_sample(2)
    if rule == "token_echo":
        return dataclasses.replace(sample, token_ids=sample.token_ids[1:])
    if rule == "shape":
        return with_states(sample, sample.states[:, :2])
    if rule == "coverage":
        return with_answer(sample, cached_tokens=3)
    if rule == "layer_ids":
        return with_commit(sample, residual_ids=(2, 1, 4))
    if rule == "supervised":
        prompt = dataclasses.replace(sample.prompt, loss_mask=np.zeros(TOKENS, bool))
        return dataclasses.replace(sample, prompt=prompt)
    if rule == "finite":
        sample.states[7, 1, 0] = np.nan
        return sample
    return put_last(sample, make_states(9)[-1, -1])


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
def test_validator_gives_the_first_violation(rule: str) -> None:
    validator = Validator(EXPECTED)
    violation(validator.check(broken(rule)), rule)
    names = [one.__name__ for one in RULES]
    before, after = names[: names.index(rule)], names[names.index(rule) + 1 :]
    assert validator.counts[rule] == {"failed": 1}
    assert all(validator.counts[name] == {"passed": 1} for name in before)
    assert not set(validator.counts) & {*after, "shared_prefix"}
    assert validator.worst_logprob == 0


def test_validator_takes_no_reference_from_a_sample_that_failed() -> None:
    validator = Validator(EXPECTED)
    wrong = sharing(16, 1)
    wrong = put_last(with_states(wrong, make_states(9)), make_states(9)[-1, -1])
    violation(validator.check(wrong), "logprob")
    assert validator.check(make_sample(1)) is None
    assert validator.check(sharing(16, 2)) is None
    assert validator.counts["shared_prefix"] == {NOT_APPLICABLE: 1, "passed": 1}


def test_validator_counts_a_shared_beginning_that_differs() -> None:
    """Each state alone may pass the logprob rule: a shift in the middle shows only against another sample."""
    validator = Validator(EXPECTED)
    assert validator.check(make_sample(1)) is None
    sample = sharing(16, 2)
    states = sample.states.copy()
    states[:16] = np.roll(states[:16], 1, axis=0)
    violation(validator.check(with_states(sample, states)), "shared_prefix")
    assert validator.counts["logprob"] == {"passed": 2}
    assert validator.counts["shared_prefix"] == {NOT_APPLICABLE: 1, "failed": 1}
