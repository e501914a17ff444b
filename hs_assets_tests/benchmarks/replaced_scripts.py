"""What hs_assets replaces, as a plugin for the benchmark: hidden states by ``.cpu()`` and ``torch.save``, on the forward path.

Loaded by SGLang in the benchmark's server B; requests whose id begins with ``old.`` are saved to the folder that
``BENCHMARK_OLD_SPOOL`` names, as ``<rid>.pt``, one tensor a layer. Of several ranks, the first one does it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Entry point."""
    folder = os.environ.get("BENCHMARK_OLD_SPOOL")
    if folder is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    old = _OldWay(Path(folder), tuple(int(i) for i in os.environ["BENCHMARK_LAYERS"].split(",")))
    HookRegistry.register(f"{runner}.load_model", old.load_model, HookType.AROUND)
    HookRegistry.register(f"{runner}.forward", old.forward, HookType.AROUND)


class _OldWay:
    def __init__(self, folder: Path, layers: tuple[int, ...]) -> None:
        self._folder = folder
        self._layers = layers
        self._batch: Any = None
        self._final: Any = None
        self._parts: dict[str, list[Any]] = {}

    def load_model(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        model = getattr(runner.model, "language_model", runner.model)
        model.model.layers_to_capture = list(self._layers)
        model.capture_aux_hidden_states = True
        model.model.norm.register_forward_hook(self._keep_final)
        model.logits_processor.register_forward_pre_hook(self._save, with_kwargs=True)
        return result

    def forward(self, original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch = forward_batch if forward_batch.forward_mode.is_extend() else None
        return original(runner, forward_batch, *args, **kwargs)

    def _keep_final(self, _module: Any, args: Any, output: Any) -> None:
        self._final = output[1] if isinstance(output, tuple) else args[0]

    def _save(self, _module: Any, args: Any, kwargs: Any) -> None:
        import torch

        batch = self._batch
        if batch is None or not batch.rids or torch.distributed.get_rank() != 0:
            return
        aux = kwargs["aux_hidden_states"] if "aux_hidden_states" in kwargs else args[4]
        if isinstance(aux, torch.Tensor):
            aux = aux.view(aux.shape[0], len(self._layers), -1).unbind(1)
        states, start = [*aux, self._final], 0
        for rid, rows, prefix in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=False):
            if rid.startswith("old."):
                chunk = [layer[start : start + rows].cpu() for layer in states]
                parts = self._parts.setdefault(rid, [])
                parts.append(chunk)
                if prefix + rows == int(rid.rpartition(".T")[2]):
                    layers = [torch.cat(pieces) for pieces in zip(*self._parts.pop(rid), strict=True)]
                    torch.save({"hidden_states": layers}, self._folder / f"{rid}.pt.part")
                    (self._folder / f"{rid}.pt.part").rename(self._folder / f"{rid}.pt")
            start += rows
