"""Captured states equal those of HF transformers, in float32, through the real server, whatever the batching.

16 prompts of mixed length are in flight at once; a chunk is 64 tokens, so that prompts come whole, in two chunks and in
three, several in one batch. All residual ids are captured, and the final state before the norm.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hs_assets.samples.eagle3 import load_sample
from hs_assets.samples.prompts import Prompt
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings
from hs_assets.serving.state import ServerFolder
from hs_assets.wire.dump import DumpLayout
from hs_assets_tests.conftest import DEMO_TEXTS, running_server, say, write_project

LAYERS, HIDDEN_SIZE, VOCABULARY, CHUNK = 8, 128, 2048, 64
LENGTHS = (1, 2, 17, 40, 63, 64, 65, 100, 127, 128, 129, 150, 160, 190, 192, 30)
RESIDUAL_IDS = tuple(range(LAYERS + 1))
TOLERANCE = 1e-4


def make_prompts() -> list[Prompt]:
    random = np.random.default_rng(7)
    return [Prompt.supervised(row, random.integers(9, VOCABULARY, length)) for row, length in enumerate(LENGTHS)]


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Largest difference over all rows of all prompts."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def reference(
    checkpoint: Callable[[str], Path],
    engine_python: Path,
    engine_env: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], dict[str, np.ndarray]]:
    """Gives what transformers makes of the prompts with a family's model; each is asked once."""
    folder = tmp_path_factory.mktemp("references")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps([prompt.input_ids.tolist() for prompt in make_prompts()]))

    def make(family: str) -> dict[str, np.ndarray]:
        path = folder / f"{family}.safetensors"
        if not path.exists():
            script = Path(__file__).with_name("hf_reference.py")
            command = [engine_python, script, checkpoint(family), prompts, path]
            subprocess.run(command, env=engine_env, check=True, capture_output=True)
        return dict(load_file(path))

    return make


@pytest.mark.parametrize(
    ("family", "tensor_parallel"), [("llama", 1), ("qwen3", 1), ("deepseek_v3", 1), ("kimi_k25", 1), ("llama", 2)]
)
def test_states_equal_transformers(
    family: str,
    tensor_parallel: int,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], dict[str, np.ndarray]],
    home: Path,
) -> None:
    prompts = make_prompts()
    project = write_project(
        home,
        checkpoint(family),
        DEMO_TEXTS,
        top=f"layers = {list(range(LAYERS))}",
        server=f'dtype = "float32"\nchunk_tokens = {CHUNK}\ntensor_parallel = {tensor_parallel}\nspool_bytes = 200_000_000',
    )
    layout = DumpLayout(1, RESIDUAL_IDS, HIDDEN_SIZE, "F32")
    with (
        running_server(project) as state,
        CaptureClient(ServerFolder(project.home.server), state, layout, ClientSettings(16, 120, 30), say) as client,
    ):
        outcomes = list(client.capture("parity", prompts))
        captured = {o.prompt.row: load_sample(o.prompt, o.files) for o in outcomes if isinstance(o, Captured)}
        ours = [captured[prompt.row].states.copy() for prompt in prompts]
        chunks = [captured[prompt.row].commit.chunks for prompt in prompts]
        echoed = [captured[prompt.row].token_ids.tolist() for prompt in prompts]

    assert echoed == [prompt.input_ids.tolist() for prompt in prompts]
    assert max(chunks) >= 3, "no prompt came in three chunks"
    assert [len(states) for states in ours] == list(LENGTHS)

    tensors = reference(family)
    theirs = [tensors[f"states_{i}"] for i in range(len(prompts))]
    post_norm = [tensors[f"post_norm_{i}"] for i in range(len(prompts))]

    difference = worst(ours, theirs)
    rows = f"{sum(LENGTHS)} rows of {len(RESIDUAL_IDS)} residual ids"
    say(f"{family}, TP {tensor_parallel}: largest difference {difference:.2e} in {rows}")
    assert difference <= TOLERANCE

    # The same comparison would notice each of the faults that others have shipped.
    shifted = [states[:, 1:] for states in theirs]
    assert worst([states[:, :-1] for states in ours], shifted) > 100 * TOLERANCE, "ids shifted by one"
    assert worst([states[:, -1] for states in ours], post_norm) > 100 * TOLERANCE, "post-norm for pre-norm"
    one, other = ours[LENGTHS.index(64)], theirs[LENGTHS.index(65)][:64]
    assert worst([one], [other]) > 100 * TOLERANCE, "two samples swapped"
