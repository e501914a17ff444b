"""What capture refuses, each by name and with its reason, and what it was proven on."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest

from hs_assets.capture.supported import _REFUSED, PROVEN, violations

VERSION, MODEL = "0.5.23", "KimiK25ForConditionalGeneration"


class Backend(Enum):
    DISABLED = "disabled"
    FULL = "full"


def allowed(**changes: object) -> SimpleNamespace:
    """Arguments of a server on a GPU on which capture runs, but for the changes."""
    values = {
        "device": "cuda",
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_config": None,
        "enable_two_batch_overlap": False,
        "enable_attn_tp_input_scattered": False,
        "enable_layernorm_sp": False,
        "enable_prefill_cp": False,
        "attn_cp_size": 1,
        "tp_size": 8,
        "pp_size": 1,
        "dp_size": 1,
        "enable_pdmux": False,
        "disaggregation_mode": "null",
        "dllm_algorithm": None,
        "enable_mixed_chunk": False,
        "speculative_algorithm": None,
        "chunked_prefill_size": 8192,
        "disable_overlap_schedule": False,
    }
    return SimpleNamespace(**{**values, **changes})


REFUSED = [
    ({"disable_radix_cache": False}, "--disable-radix-cache missing", "cached prefixes are not computed"),
    ({"disable_radix_cache": None}, "--disable-radix-cache missing", "cached prefixes are not computed"),
    ({"disable_prefill_cuda_graph": False}, "--disable-prefill-cuda-graph missing", "hooks do not run inside a CUDA graph"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap", "captures nothing"),
    ({"enable_attn_tp_input_scattered": True}, "--enable-attn-tp-input-scattered", "only its share of the rows"),
    ({"enable_layernorm_sp": True}, "--enable-layernorm-sp", "only its share of the rows"),
    ({"enable_prefill_cp": True}, "--enable-prefill-cp", "only its share of the rows"),
    ({"attn_cp_size": 2}, "--attn-cp-size", "only its share of the rows"),
    ({"pp_size": 2}, "--pp-size", "only its share of the layers"),
    ({"dp_size": 8}, "--dp-size", "different groups"),
    ({"attn_dp_size": 8}, "--attn-dp-size", "requests of its group"),
    ({"moe_dp_size": 2}, "--moe-dp-size", "only its share of the rows"),
    ({"dcp_size": 2}, "--dcp-size", "never compared"),
    ({"enable_pdmux": True}, "--enable-pdmux", "several passes"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode", "another server"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode", "another server"),
    ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm", "no causal prefill"),
    ({"enable_mixed_chunk": True}, "--enable-mixed-chunk", "decode rows mix with prefill rows"),
    ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm", "draft model"),
]


@pytest.fixture(autouse=True)
def _no_delay_sample(monkeypatch):
    monkeypatch.delenv("SGLANG_ENABLE_DELAY_SAMPLE", raising=False)


def test_allowed():
    assert violations(allowed(), VERSION, MODEL) == []


def test_allowed_on_a_cpu_where_prefill_has_no_graphs():
    assert violations(allowed(device="cpu", disable_prefill_cuda_graph=False), VERSION, MODEL) == []


def test_every_model_class_is_allowed_on_its_version():
    assert all(violations(allowed(), version, model) == [] for version, models in PROVEN.items() for model in models)
    assert MODEL in PROVEN[VERSION]


@pytest.mark.parametrize(("changes", "flag", "reason"), REFUSED)
def test_refused(changes, flag, reason):
    found = violations(allowed(**changes), VERSION, MODEL)
    assert len(found) == 1
    assert found[0].startswith(f"{flag}: ")
    assert reason in found[0]


def test_each_entry_of_the_list_is_tried_above():
    assert {flag for _, flag, _ in REFUSED} == {flag for flag, _, _ in _REFUSED}


def test_all_reasons_are_given_at_once():
    changes = {name: value for change, _, _ in REFUSED for name, value in change.items()}
    assert len(violations(allowed(**changes), "0.0.1", MODEL)) == len(_REFUSED) + 1


def test_a_server_that_does_not_know_the_radix_flag_is_refused():
    args = allowed()
    del args.disable_radix_cache
    assert [text.partition(":")[0] for text in violations(args, VERSION, MODEL)] == ["--disable-radix-cache missing"]


@pytest.mark.parametrize("name", ["enable_pdmux", "attn_cp_size", "dllm_algorithm", "enable_layernorm_sp", "cuda_graph_config"])
def test_a_server_that_does_not_know_a_refused_mode_cannot_be_in_it(name):
    args = allowed()
    delattr(args, name)
    assert violations(args, VERSION, MODEL) == []


@pytest.mark.parametrize(
    ("backend", "refused"),
    [
        ("disabled", False),
        (Backend.DISABLED, False),
        ("full", True),
        ("breakable", True),
        ("tc_piecewise", True),
        (Backend.FULL, True),
    ],
)
def test_prefill_graphs_by_configuration(backend, refused):
    config = SimpleNamespace(prefill=SimpleNamespace(backend=backend))
    found = violations(allowed(disable_prefill_cuda_graph=False, cuda_graph_config=config), VERSION, MODEL)
    assert [text.partition(":")[0] for text in found] == ["--disable-prefill-cuda-graph missing"] * refused


@pytest.mark.parametrize(
    ("version", "model"),
    [("0.5.13", MODEL), ("0.5.24", MODEL), ("0.5.23.post1", MODEL), ("", MODEL), (VERSION, "GptOssForCausalLM"), (VERSION, "")],
)
def test_unproven_version_or_model_class_names_those_that_passed(version, model):
    found = violations(allowed(), version, model)
    assert len(found) == 1
    assert found[0].startswith(f"SGLang {version} with {model} has not passed the parity tests")
    for proven, models in PROVEN.items():
        assert f"SGLang {proven}: " in found[0]
        assert all(name in found[0] for name in models)


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "y", "Y"])
def test_delayed_sampling_is_refused(monkeypatch, value):
    """The words that SGLang's own reading of its environment takes for true."""
    monkeypatch.setenv("SGLANG_ENABLE_DELAY_SAMPLE", value)
    found = violations(allowed(), VERSION, MODEL)
    assert len(found) == 1
    assert found[0].startswith("SGLANG_ENABLE_DELAY_SAMPLE: ")


@pytest.mark.parametrize("value", ["0", "false", "no", "n"])
def test_delayed_sampling_switched_off(monkeypatch, value):
    monkeypatch.setenv("SGLANG_ENABLE_DELAY_SAMPLE", value)
    assert violations(allowed(), VERSION, MODEL) == []
