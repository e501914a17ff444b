"""Facts of a checkpoint and the rows of its head, against the same formula in float64, or a reason why there are none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hs_assets.errors import ConfigError, HsAssetsError
from hs_assets.samples.model import Head, ModelFacts, load_head, read_model_facts, shard_files

LAYERS, HIDDEN, VOCABULARY = 4, 16, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
NEEDED = ("architectures", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
FLOATS = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
IDS = np.array([0, 7, 39, 7], np.int64)


def write_config(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


def make_tensors(dtype: np.dtype = FLOATS["fp32"], prefix: str = "model.", seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    outside = "language_model." if prefix == "language_model.model." else ""
    return {
        f"{prefix}embed_tokens.weight": random.normal(size=(VOCABULARY, HIDDEN)).astype(dtype),
        f"{prefix}layers.0.input_layernorm.weight": random.normal(size=HIDDEN).astype(dtype),
        f"{prefix}norm.weight": random.normal(1, 0.2, size=HIDDEN).astype(dtype),
        f"{outside}lm_head.weight": random.normal(size=(VOCABULARY, HIDDEN)).astype(dtype),
    }


def write_model(folder: Path, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    write_config(folder, **fields)
    save_file(make_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def head_of(folder: Path) -> Head:
    head = load_head(read_model_facts(folder))
    assert isinstance(head, Head), head
    return head


def reason_of(folder: Path) -> str:
    head = load_head(read_model_facts(folder))
    assert isinstance(head, str)
    return head


def reference(
    state: np.ndarray,
    ids: np.ndarray,
    norm: np.ndarray,
    matrix: np.ndarray,
    eps: float = 1e-5,
    softcap: float | None = None,
    scale: float = 1.0,
) -> np.ndarray:
    """The logits, one number at a time, in float64."""
    x = [float(v) for v in state]
    rms = (sum(v * v for v in x) / len(x) + eps) ** 0.5
    normed = [v / rms * float(w) for v, w in zip(x, norm, strict=True)]
    logits = np.array([sum(float(a) * b for a, b in zip(matrix[i], normed, strict=True)) for i in ids]) * scale
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


@pytest.fixture
def state() -> np.ndarray:
    return np.random.default_rng(5).normal(0, 30, HIDDEN).astype(np.float32)


# Facts


def test_facts(tmp_path: Path) -> None:
    assert read_model_facts(write_config(tmp_path)) == ModelFacts(
        path=tmp_path,
        model_class="LlamaForCausalLM",
        num_layers=4,
        hidden_size=16,
        vocab_size=40,
        context_length=512,
        norm_eps=1e-5,
        tied_embeddings=False,
        logit_softcap=None,
        logit_scale=1.0,
    )


def test_facts_of_a_model_with_a_text_config(tmp_path: Path) -> None:
    """The sizes are those of the text model; the class is that of the whole."""
    text = {**CONFIG, "tie_word_embeddings": True, "final_logit_softcapping": 30.0, "logit_scale": 0.5}
    vision = {"hidden_size": 99, "num_hidden_layers": 98}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "hidden_size": 97, "tie_word_embeddings": False}))
    facts = read_model_facts(tmp_path)
    assert facts.model_class == "KimiK25ForConditionalGeneration"
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.context_length) == (4, 16, 40, 512)
    assert (facts.tied_embeddings, facts.logit_softcap, facts.logit_scale) == (True, 30.0, 0.5)


@pytest.mark.parametrize(("outer", "tied"), [({}, False), ({"tie_word_embeddings": True}, True)])
def test_tied_embeddings_may_be_said_outside_the_text_config(outer: dict[str, bool], tied: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": CONFIG, **outer}))
    assert read_model_facts(tmp_path).tied_embeddings is tied


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read") as error:
        read_model_facts(tmp_path / "nowhere")
    assert error.value.where == tmp_path / "nowhere"
    assert error.value.remedy == "check model.path; the demo's model is made by hs-assets demo"


@pytest.mark.parametrize("field", NEEDED)
def test_a_config_that_lacks_a_field(field: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    fields = {name: value for name, value in CONFIG.items() if name != field}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"config\.json lacks what is needed") as error:
        read_model_facts(tmp_path)
    assert error.value.where == tmp_path / "config.json"
    assert field in str(error.value.got)
    assert error.value.remedy


@pytest.mark.parametrize(
    "body",
    ["", "{", "null", "[]", '"text"', "{}", '{"architectures": []}', '{"text_config": [1]}', "\ud800"],
    ids=range(9),
)
def test_a_config_that_is_none(body: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(body.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as error:
        read_model_facts(tmp_path)
    assert error.value.where == tmp_path / "config.json"


@pytest.mark.parametrize(
    "fields",
    [{"architectures": None}, {"architectures": []}, {"num_hidden_layers": None}, {"hidden_size": "16"}, {"vocab_size": [40]}],
)
def test_a_field_of_another_type(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_model_facts(write_config(tmp_path, **fields))
    assert error.value.where == tmp_path / "config.json"


# The head


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS.keys())
def test_logits(dtype: np.dtype, tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors(dtype)
    head = head_of(write_model(tmp_path, tensors))
    expected = reference(state, IDS, tensors["model.norm.weight"], tensors["lm_head.weight"])
    logits = head.logits(state, IDS)
    assert (logits.dtype, logits.shape) == (np.float32, (4,))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)
    assert logits[1] == logits[3]


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS.keys())
def test_states_of_any_dtype(dtype: np.dtype, tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors()
    head = head_of(write_model(tmp_path, tensors))
    rounded = state.astype(dtype)
    expected = reference(rounded, IDS, tensors["model.norm.weight"], tensors["lm_head.weight"])
    np.testing.assert_allclose(head.logits(rounded, IDS), expected, rtol=1e-5, atol=1e-4)


def test_tied_embeddings(tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors()
    embeddings = reference(state, IDS, tensors["model.norm.weight"], tensors["model.embed_tokens.weight"])
    separate = reference(state, IDS, tensors["model.norm.weight"], tensors["lm_head.weight"])
    tied = head_of(write_model(tmp_path / "tied", tensors, tie_word_embeddings=True))
    untied = head_of(write_model(tmp_path / "untied", tensors))
    np.testing.assert_allclose(tied.logits(state, IDS), embeddings, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(untied.logits(state, IDS), separate, rtol=1e-5, atol=1e-4)
    assert np.abs(embeddings - separate).max() > 1

    del tensors["lm_head.weight"]
    without = head_of(write_model(tmp_path / "without", tensors, tie_word_embeddings=True))
    np.testing.assert_array_equal(without.logits(state, IDS), tied.logits(state, IDS))


@pytest.mark.parametrize(("softcap", "scale"), [(30.0, 1.0), (None, 0.125), (2.0, 0.5)])
def test_softcap_and_scale(softcap: float | None, scale: float, tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors()
    head = head_of(write_model(tmp_path, tensors, final_logit_softcapping=softcap, logit_scale=scale))
    expected = reference(state, IDS, tensors["model.norm.weight"], tensors["lm_head.weight"], softcap=softcap, scale=scale)
    np.testing.assert_allclose(head.logits(state, IDS), expected, rtol=1e-5, atol=1e-4)


def test_eps_counts_where_the_state_is_small(tmp_path: Path, state: np.ndarray) -> None:
    tensors, small = make_tensors(), state * np.float32(1e-4)
    head = head_of(write_model(tmp_path, tensors, rms_norm_eps=1e-3))
    norm, matrix = tensors["model.norm.weight"], tensors["lm_head.weight"]
    np.testing.assert_allclose(head.logits(small, IDS), reference(small, IDS, norm, matrix, 1e-3), rtol=1e-5, atol=1e-6)
    assert not np.allclose(head.logits(small, IDS), reference(small, IDS, norm, matrix, 1e-5))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_names_of_tensors(prefix: str, tmp_path: Path, state: np.ndarray) -> None:
    """As in Llama, in Kimi-K2.5, and under one more name that vision models use."""
    tensors = make_tensors(prefix=prefix)
    head = head_of(write_model(tmp_path, tensors))
    matrix = next(tensor for name, tensor in tensors.items() if name.endswith("lm_head.weight"))
    expected = reference(state, IDS, tensors[f"{prefix}norm.weight"], matrix)
    np.testing.assert_allclose(head.logits(state, IDS), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("other", ["vision_model.norm.weight", "mm_projector.model.norm.weight", "audio_model.norm.weight"])
def test_the_norm_of_another_part_is_not_taken(other: str, tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors(prefix="language_model.model.")
    beside = {**tensors, other: np.full(HIDDEN, 100, np.float32)}
    head = load_head(read_model_facts(write_model(tmp_path, beside)))
    expected = reference(state, IDS, tensors["language_model.model.norm.weight"], tensors["language_model.lm_head.weight"])
    assert isinstance(head, str) or np.allclose(head.logits(state, IDS), expected, rtol=1e-5, atol=1e-4)


def split(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """The same tensors in a file each, with an index that says where."""
    write_config(folder)
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        weight_map[name] = f"model-{number:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("with_index", [True, False])
def test_a_checkpoint_in_several_files(with_index: bool, tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors(FLOATS["bf16"])
    folder = split(tmp_path, tensors)
    if not with_index:
        (folder / "model.safetensors.index.json").unlink()
    expected = reference(state, IDS, tensors["model.norm.weight"], tensors["lm_head.weight"])
    np.testing.assert_allclose(head_of(folder).logits(state, IDS), expected, rtol=1e-5, atol=1e-4)
    assert [path.name for path in shard_files(folder)] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]


def test_only_the_files_that_are_needed_are_opened(tmp_path: Path) -> None:
    """547 GB of shards are not touched for a norm and a head."""
    tensors = make_tensors()
    folder = split(tmp_path, tensors)
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00004.safetensors").write_bytes(b"no tensors")
    assert isinstance(load_head(read_model_facts(folder)), Head)


# No head to check against


def test_an_unknown_norm(tmp_path: Path) -> None:
    assert "Gemma9ForCausalLM" in reason_of(write_model(tmp_path, architectures=["Gemma9ForCausalLM"]))


def test_no_weights(tmp_path: Path) -> None:
    assert "no final norm" in reason_of(write_config(tmp_path))


@pytest.mark.parametrize("missing", ["model.norm.weight", "lm_head.weight"])
def test_a_tensor_is_missing(missing: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors[missing]
    assert "lm_head.weight" in reason_of(write_model(tmp_path, tensors))


def test_a_shard_is_missing(tmp_path: Path) -> None:
    folder = split(tmp_path, make_tensors())
    (folder / "model-00004-of-00004.safetensors").unlink()
    assert reason_of(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.uint8])
def test_a_quantised_head(dtype: type, name: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[name] = tensors[name].astype(dtype)
    assert "quantised" in reason_of(write_model(tmp_path, tensors))


def test_a_head_in_packed_integers(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight").astype(np.int32)
    assert "lm_head.weight" in reason_of(write_model(tmp_path, tensors))


def test_layers_may_be_quantised_as_long_as_the_head_is_not(tmp_path: Path, state: np.ndarray) -> None:
    tensors = make_tensors(FLOATS["bf16"])
    tensors["model.layers.0.mlp.up_proj.weight_packed"] = np.ones((4, 4), np.int32)
    head = head_of(write_model(tmp_path, tensors, quantization_config={"quant_method": "compressed-tensors"}))
    expected = reference(state, IDS, tensors["model.norm.weight"], tensors["lm_head.weight"])
    np.testing.assert_allclose(head.logits(state, IDS), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lm_head.weight", (VOCABULARY + 24, HIDDEN)),
        ("lm_head.weight", (VOCABULARY, HIDDEN // 2)),
        ("lm_head.weight", (VOCABULARY * HIDDEN,)),
        ("model.norm.weight", (HIDDEN + 1,)),
        ("model.norm.weight", (1,)),
        ("model.norm.weight", (HIDDEN, 1)),
    ],
)
def test_another_shape(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {**make_tensors(), name: np.ones(shape, np.float32)}
    assert "shape" in reason_of(write_model(tmp_path, tensors))


def test_facts_of_another_checkpoint_have_another_head(tmp_path: Path, state: np.ndarray) -> None:
    """Heads are kept; each by the facts that it belongs to."""
    one = head_of(write_model(tmp_path / "one", make_tensors(seed=1)))
    other = head_of(write_model(tmp_path / "other", make_tensors(seed=2)))
    assert not np.allclose(one.logits(state, IDS), other.logits(state, IDS))
    facts = read_model_facts(tmp_path / "one")
    scaled = load_head(dataclasses.replace(facts, logit_scale=2.0))
    assert isinstance(scaled, Head)
    np.testing.assert_allclose(scaled.logits(state, IDS), 2 * one.logits(state, IDS), rtol=1e-6)


@pytest.mark.parametrize(
    "keep",
    [slice(0), slice(20), slice(-40)],
    ids=["empty", "in the header", "in the data"],
)
def test_a_file_that_is_cut(keep: slice, tmp_path: Path) -> None:
    """An error that says where, or a reason why there is no head; never numbers from beyond the end."""
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[keep])
    try:
        outcome = load_head(read_model_facts(tmp_path))
    except HsAssetsError as error:
        outcome = str(error.where)
    assert isinstance(outcome, str)
    assert outcome
