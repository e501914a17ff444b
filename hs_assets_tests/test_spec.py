"""What changes the state fingerprint, and what does not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hs_assets.errors import ConfigError, ServerStartError
from hs_assets.serving.launch import resolve
from hs_assets.serving.spec import Difference, StateSpec, numeric_flags, sglang_version, spec_differences, weight_fingerprint
from hs_assets_tests.conftest import DEMO_TEXTS, write_project


@pytest.fixture
def spec(home: Path, checkpoint: Callable[[str], Path]) -> Callable[..., StateSpec]:
    """The spec of a project with some lines of configuration, on the tiny Llama or another model."""

    def build(path: Path | None = None, **settings: str) -> StateSpec:
        settings = {"top": "layers = [2]", **settings}
        return resolve(write_project(home, path or checkpoint("llama"), DEMO_TEXTS, **settings)).spec

    return build


def test_what_changes_no_number_changes_no_fingerprint(
    spec: Callable[..., StateSpec], tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint("llama"), moved)
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    same = {
        spec().fingerprint,
        spec(top="layers = [1, 5]").fingerprint,
        spec(moved).fingerprint,
        spec(prompts="max_tokens = 99").fingerprint,
        spec(server='args = ["--mem-fraction-static", "0.5", "--log-level", "info"]').fingerprint,
        spec(server="writers = 1\nmax_in_flight = 2").fingerprint,
        spec(rules="logprob_tolerance = 0.1").fingerprint,
    }
    assert len(same) == 1


def test_what_may_change_numbers_changes_the_fingerprint(
    spec: Callable[..., StateSpec], checkpoint: Callable[[str], Path]
) -> None:
    specs = [
        spec(),
        spec(checkpoint("qwen3")),
        spec(server='dtype = "float32"'),
        spec(server="chunk_tokens = 64"),
        spec(server="tensor_parallel = 2"),
        spec(server='args = ["--attention-backend", "triton"]'),
        spec(server='args = ["--a-flag-nobody-knows"]'),
        spec(model='revision = "v2"'),
        dataclasses.replace(spec(), sglang_version="0.5.24"),
        dataclasses.replace(spec(), capture_version=2),
    ]
    assert len({one.fingerprint for one in specs}) == len(specs)


def test_one_changed_weight_changes_the_weight_fingerprint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As between two fine-tunes: the same names, shapes and sizes."""
    tuned = tmp_path / "tuned"
    shutil.copytree(checkpoint("llama"), tuned)
    assert weight_fingerprint(tuned) == weight_fingerprint(checkpoint("llama"))
    weights = tuned / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 70_000] = bytes(70_000)
    weights.write_bytes(data)
    assert weight_fingerprint(tuned) != weight_fingerprint(checkpoint("llama"))


def test_flags_are_grouped_with_their_values() -> None:
    words = ["--tp-size", "2", "--port=3", "--log-level", "info", "--x", "a", "b", "--dtype=float32", "--enable-y"]
    assert numeric_flags(words) == ("--dtype float32", "--enable-y", "--tp-size 2", "--x a b")
    with pytest.raises(ConfigError, match="must begin with a flag"):
        numeric_flags(["float32"])


def test_an_interpreter_without_sglang_is_named(tmp_path: Path) -> None:
    import sys

    with pytest.raises(ServerStartError, match=r"has no SGLang(.|\n)*check server.python"):
        sglang_version(Path(sys.executable))
    with pytest.raises(ServerStartError, match="cannot be run"):
        sglang_version(tmp_path / "no-such-python")


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no safetensors files(.|\n)*check model.path"):
        weight_fingerprint(tmp_path)


def test_what_differs_from_a_spec_that_was_kept_is_named(
    spec: Callable[..., StateSpec], checkpoint: Callable[[str], Path]
) -> None:
    now = spec(server='tensor_parallel = 2\nargs = ["--moe-a2a-backend", "deepep"]')
    kept = json.loads(json.dumps(dataclasses.asdict(spec())))
    assert spec_differences(kept, spec()) == []
    assert spec_differences(kept, dataclasses.replace(spec(), model_path="/moved")) == []
    assert spec_differences(kept, now) == [
        Difference("flags", "--tp-size 1", "--moe-a2a-backend deepep, --tp-size 2"),
    ]
    (fewer,) = spec_differences(json.loads(json.dumps(dataclasses.asdict(now))), spec(server="tensor_parallel = 2"))
    assert (fewer.expected, fewer.got) == ("--moe-a2a-backend deepep", "none of --moe-a2a-backend deepep")
    other = dataclasses.replace(spec(checkpoint("qwen3")), sglang_version="0.5.24")
    found = {one.name: (one.expected, one.got) for one in spec_differences(kept, other)}
    assert found.keys() == {"weight fingerprint", "model class", "sglang version"}
    assert found["model class"] == ("LlamaForCausalLM", "Qwen3ForCausalLM")
    assert found["sglang version"] == (kept["sglang_version"], "0.5.24")
    for name in kept:  # whatever makes another fingerprint is named
        changed = dataclasses.replace(spec(), **{name: ("--x",) if name == "flags" else "changed"})
        assert bool(spec_differences(kept, changed)) == (changed.fingerprint != spec().fingerprint), name


def test_a_spec_of_another_version_is_compared_as_far_as_it_goes(spec: Callable[..., StateSpec]) -> None:
    kept = dataclasses.asdict(spec()) | {"rope": "yarn"}
    del kept["device"]
    assert spec_differences(kept, spec()) == [
        Difference("device", "not recorded", "cpu"),
        Difference("rope", "yarn", "unknown to this version"),
    ]
