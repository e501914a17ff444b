"""Where to hook into a loaded model: the same places in SGLang 0.5.17 and 0.5.23."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hs_assets.errors import RefusedError

_FUSED_NORM = "forward_with_allreduce_fusion"


@dataclass(frozen=True, slots=True)
class Points:
    """The parts of a model that capture touches.

    ``causal_lm`` runs ``body`` and then ``logits_processor``; ``body`` is the stack of ``layers`` with its final ``norm``.
    """

    causal_lm: torch.nn.Module
    body: torch.nn.Module
    layers: torch.nn.ModuleList
    norm: torch.nn.Module
    logits_processor: torch.nn.Module


def find_points(model: torch.nn.Module) -> Points:
    """The hook points of `model`.

    Raises:
        RefusedError: one is missing, by name.
    """
    causal_lm = getattr(model, "language_model", model)
    body = _part(causal_lm, "model")
    for owner, name in ((causal_lm, "capture_aux_hidden_states"), (body, "layers_to_capture")):
        if not hasattr(owner, name):
            raise RefusedError("the model cannot capture", where=type(owner).__name__, expected=f"an attribute {name}")
    layers = _part(body, "layers")
    if not isinstance(layers, torch.nn.ModuleList):
        raise RefusedError("the model's layers are no list", where=type(body).__name__, got=type(layers).__name__)
    return Points(causal_lm, body, layers, _part(body, "norm"), _part(causal_lm, "logits_processor"))


def capture_layers(points: Points, aux: tuple[int, ...]) -> tuple[int, ...]:
    """Make the model capture the inputs of the layers `aux`, and read back what it will capture.

    The list is set directly: the models' own setters shift the ids, each in its own way.
    """
    points.body.layers_to_capture = list(aux)
    points.causal_lm.capture_aux_hidden_states = True
    return tuple(int(i) for i in points.body.layers_to_capture)


def probe_layer_input(layer: torch.nn.Module, callback: Callable[[torch.Tensor], None]) -> None:
    """Call `callback` with the residual stream [T, H] that enters `layer`, as its input norm saw it.

    Independent of SGLang's own capture: the norm returns the updated residual stream beside its normed output (and is
    given the stream itself where there is no residual yet).
    """
    norm = _part(layer, "input_layernorm")

    def after(_module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        callback(output[1] if isinstance(output, tuple) else args[0])

    norm.register_forward_hook(after)
    fused = getattr(norm, _FUSED_NORM, None)
    if fused is not None:  # all-reduce and norm in one kernel: called beside forward()

        def with_probe(*args: Any, **kwargs: Any) -> Any:
            output = fused(*args, **kwargs)
            after(norm, args, output)
            return output

        setattr(norm, _FUSED_NORM, with_probe)


def _part(owner: torch.nn.Module, name: str) -> torch.nn.Module:
    part = getattr(owner, name, None)
    if not isinstance(part, torch.nn.Module):
        raise RefusedError(
            "a hook point is missing",
            where=type(owner).__name__,
            expected=f"a module called {name}",
            got=type(part).__name__,
            remedy="use one of the model classes and SGLang versions that hs-assets supports (README)",
        )
    return part
