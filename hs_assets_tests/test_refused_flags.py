"""Each unsafe flag goes through SGLang's own parsing and is refused by its name; what is not unsafe is not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RADIX = "--disable-radix-cache"
DRAFT = "--speculative-draft-model-path"
CASES: list[tuple[list[str], list[str]]] = [
    ([RADIX], []),
    ([RADIX, "--chunked-prefill-size", "64"], []),
    ([RADIX, "--tp-size", "2"], []),
    ([], ["--disable-radix-cache missing: cached prefixes are not computed, so not captured"]),
    ([RADIX, "--enable-two-batch-overlap"], ["--enable-two-batch-overlap: it captures nothing"]),
    ([RADIX, "--enable-attn-tp-input-scattered"], ["--enable-attn-tp-input-scattered: a rank sees only its share of the rows"]),
    ([RADIX, "--enable-layernorm-sp"], ["--enable-layernorm-sp: a rank sees only its share of the rows"]),
    ([RADIX, "--enable-prefill-cp"], ["--enable-prefill-cp: a rank sees only its share of the rows"]),
    ([RADIX, "--attn-cp-size", "2"], ["--attn-cp-size: a rank sees only its share of the rows"]),
    ([RADIX, "--pp-size", "2"], ["--pp-size: a rank sees only its share of the layers"]),
    ([RADIX, "--dp-size", "2"], ["--dp-size: ranks of different groups would write under the same number"]),
    (
        [RADIX, "--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"],
        ["--dp-size: ranks of different groups would write under the same number"],
    ),
    (
        [RADIX, "--attn-dp-size", "2", "--tp-size", "2"],
        ["--attn-dp-size: a rank sees only the requests of its group"],
    ),
    ([RADIX, "--moe-dp-size", "2", "--tp-size", "2"], ["--moe-dp-size: a rank sees only its share of the rows"]),
    ([RADIX, "--dcp-size", "2", "--tp-size", "2"], ["--dcp-size: it was never compared with one rank"]),
    ([RADIX, "--enable-pdmux"], ["--enable-pdmux: prefill is split over several passes"]),
    ([RADIX, "--disaggregation-mode", "prefill"], ["--disaggregation-mode: prefill runs on another server"]),
    ([RADIX, "--disaggregation-mode", "decode"], ["--disaggregation-mode: prefill runs on another server"]),
    ([RADIX, "--dllm-algorithm", "LowConfidence"], ["--dllm-algorithm: there is no causal prefill"]),
    ([RADIX, "--enable-mixed-chunk"], ["--enable-mixed-chunk: decode rows mix with prefill rows"]),
    ([RADIX, "--speculative-algorithm", "NGRAM"], ["--speculative-algorithm: a draft model truncates what is captured"]),
    (
        [RADIX, "--speculative-algorithm", "EAGLE3", DRAFT, "MODEL"],
        ["--speculative-algorithm: a draft model truncates what is captured"],
    ),
    (
        ["SGLANG_ENABLE_DELAY_SAMPLE=1", RADIX],
        ["SGLANG_ENABLE_DELAY_SAMPLE: sampling runs after the batch was let go of"],
    ),
]


@pytest.fixture(scope="module")
def found(engine_python: Path, engine_env: dict[str, str], checkpoint: Callable[[str], Path]) -> list[list[str]]:
    model = str(checkpoint("llama"))
    flags = json.dumps([[model if word == "MODEL" else word for word in words] for words, _ in CASES])
    command = [engine_python, Path(__file__).with_name("parse_flags.py"), model]
    result = subprocess.run(command, env=engine_env, input=flags, check=True, capture_output=True, text=True)
    answers: list[list[str]] = json.loads(result.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join(words[-3:]) or "none" for words, _ in CASES])
def test_what_sglang_makes_of_the_flags(found: list[list[str]], case: int) -> None:
    assert found[case] == CASES[case][1]
