"""A plugin that puts a fault into the capture of a real server, as long as the file `FAULT_ENV` holds its name.

plain_hook      all states by a hook on the decoder layers: partial sums where the all-reduce is fused into the next norm
partial_sums    the same made by hand, on the CPU, which fuses nothing, and after the last layer, which SGLang never fuses
other_layers    the server captures the layers after those it was asked for
fewer_layers    the server captures one layer less
swapped_slots   the first two slots change places
post_norm       the final state is delivered after the final norm
raise           a hook raises
flipped_byte    a bit of a sample's row 3 changes between the device and the dump; of every row of the partitions that are
                named after it, where there are any
slow_writer     every chunk of a sample takes a fifth of a second to write
dead_writer     the thread that writes row 13 ends
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

FAULT_ENV = "HS_ASSETS_TEST_FAULT"


def register() -> None:
    """Entry point: inert without `FAULT_ENV`, and where nothing is captured."""
    if FAULT_ENV in os.environ and "HS_ASSETS_CAPTURE" in os.environ:
        _put_into_session(Path(os.environ[FAULT_ENV]))
        from hs_assets.capture import ring

        ring.WRITER = ("-P", __file__)  # this module as the writer process: see its end


def _fault(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _put_into_session(path: Path) -> None:
    import torch

    from hs_assets.capture.session import Session

    init, begin, stack, after_norm = Session.__init__, Session._begin, Session._stack, Session._after_final_norm
    seen: dict[tuple[str, int], Any] = {}

    def note(kind: str, residual_id: int, value: Any) -> None:
        seen[kind, residual_id] = value

    def note_plain(residual_id: int, output: Any) -> None:
        if isinstance(output, tuple):  # SGLang 0.5.23 gives an object that owes its sum
            note("plain", residual_id, output[0] + output[1])
            note("residual", residual_id, output[1].clone())

    def note_residual(residual_id: int, output: Any) -> None:
        if isinstance(output, tuple):
            note("residual", residual_id, output[1].clone())

    def note_partial(residual_id: int, module: Any, args: Any) -> None:
        note("partial", residual_id, torch.nn.functional.linear(args[0], module.weight))

    def note_partial_of_experts(residual_id: int, module: Any, args: Any) -> None:
        if _fault(path) == "partial_sums":
            from sglang.srt.runtime_context import get_forward  # type: ignore[import-not-found,unused-ignore]

            with get_forward().scoped(fuse_mlp_allreduce=True, moe_output_buffer=None):  # as 0.5.17 scopes a fused layer
                note("partial", residual_id, module.forward(args[0].clone(), *args[1:]))

    def patched_init(self: Any, config: Any, rank: int, points: Any, *rest: Any) -> None:
        init(self, config, rank, points, *rest)
        self.body, self.last = points.body, len(points.layers)
        for i in (*self._aux, self.last):
            layer = points.layers[i - 1]
            layer.register_forward_hook(lambda _m, _a, output, i=i: note_plain(i, output))
            down = getattr(layer.mlp, "down_proj", None)
            if down is not None:
                layer.post_attention_layernorm.register_forward_hook(lambda _m, _a, output, i=i: note_residual(i, output))
                down.register_forward_pre_hook(lambda module, args, i=i: note_partial(i, module, args))
            else:
                layer.mlp.register_forward_pre_hook(lambda module, args, i=i: note_partial_of_experts(i, module, args))

    def patched_begin(self: Any, batch: Any) -> Any:
        fault = _fault(path)
        shift = 1 if fault == "other_layers" else 0
        captured = self._aux[:-1] if fault == "fewer_layers" else self._aux
        if fault != "plain_hook":  # on a GPU batches overlap: never change what is captured there
            self.body.layers_to_capture = [i + shift for i in captured]
        return begin(self, batch)

    def patched_stack(self: Any, aux: Any, final: Any) -> Any:
        match _fault(path):
            case "plain_hook":
                aux, final = [seen["plain", i] for i in self._aux], seen["plain", self.last]
            case "partial_sums":
                *aux, final = [seen["residual", i] + seen["partial", i] for i in (*self._aux, self.last)]
            case "raise":
                raise RuntimeError("made to fail")
            case "swapped_slots":
                states = stack(self, aux, final)
                return states[:, [1, 0, *range(2, states.shape[1])]].contiguous()
        return stack(self, aux, final)

    def patched_after_norm(self: Any, module: Any, args: Any, output: Any) -> None:
        after_norm(self, module, args, output)
        if _fault(path) == "post_norm" and self._pass is not None:
            self._pass.final = output[0] if isinstance(output, tuple) else output

    Session.__init__, Session._begin = patched_init, patched_begin  # type: ignore[method-assign]
    Session._stack, Session._after_final_norm = patched_stack, patched_after_norm  # type: ignore[method-assign]


def _put_into_writers(path: Path) -> None:
    from hs_assets.capture.assembly import Assembly
    from hs_assets.wire.rid import Kind

    add = Assembly.add

    def patched_add(self: Any, files: Any, rid: Any, prefix: int, chunk: Any) -> None:
        fault, *partitions = (_fault(path) if rid.kind is Kind.SAMPLE else "").split() or [""]
        if fault == "slow_writer":
            time.sleep(0.2)
        elif fault == "dead_writer" and rid.row == 13:
            raise SystemExit
        elif fault == "flipped_byte" and (rid.partition in partitions if partitions else rid.row == 3):
            damaged = bytearray(chunk.states)
            damaged[len(damaged) // 2] ^= 1
            chunk = dataclasses.replace(chunk, states=memoryview(damaged))
        add(self, files, rid, prefix, chunk)

    Assembly.add = patched_add  # type: ignore[method-assign]


if __name__ == "__main__":
    from hs_assets.capture import writing

    _put_into_writers(Path(os.environ[FAULT_ENV]))
    writing.run(sys.argv[1:])
