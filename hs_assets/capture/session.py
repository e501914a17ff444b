"""The hooks of one scheduler process: they collect the states of a prefill batch and hand them to `Transfer`.

A forward pass goes: `batch` notes whose rows are in it, the model captures its auxiliary states, the final norm's hook
keeps the stream that enters it, and when the logits processor is called all states of the batch are there.
An error in a hook fails the samples of that batch; it never reaches the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hs_assets.capture.assembly import DumpFacts
from hs_assets.capture.batch import Segment, segments
from hs_assets.capture.checksums import row_checksums
from hs_assets.capture.messages import WritingTask
from hs_assets.capture.monitor import Monitor
from hs_assets.capture.points import Points, probe_layer_input
from hs_assets.capture.ring import Ring
from hs_assets.capture.transfer import StatesBatch, Transfer
from hs_assets.errors import WireError
from hs_assets.wire.dump import TOKEN_BYTES
from hs_assets.wire.records import CaptureConfig
from hs_assets.wire.rid import Kind, parse_rid
from hs_assets.wire.spool import Spool

_BLOCK_BYTES = 128 << 20
_BLOCKS, _BLOCKS_FOR_CANARIES = 8, 2
_AUX_ARGUMENT = 4
"""Position of ``aux_hidden_states`` in ``LogitsProcessor.forward`` (0.5.17 and 0.5.23)."""


@dataclass(slots=True)
class _Pass:
    """One forward pass: our segments in it, its token ids, and the states seen so far, each [T, H]."""

    segments: list[Segment]
    token_ids: torch.Tensor
    final: torch.Tensor | None = None
    probed: dict[int, torch.Tensor] = field(default_factory=dict)
    submitted: bool = False

    def check(self, states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Raise WireError unless there are all rows of the segments."""
        rows = max((segment.start + segment.rows for segment in self.segments), default=0)
        if min(len(states), len(token_ids)) < rows:
            raise WireError("a pass has fewer rows than its requests", expected=rows, got=(len(states), len(token_ids)))

    @property
    def has_canary(self) -> bool:
        return any(segment.rid.kind is Kind.CANARY for segment in self.segments)


class Session:
    """Capture in one scheduler process; ``rank`` 0 writes the dumps of samples. ``dtype`` is the safetensors name."""

    def __init__(
        self, config: CaptureConfig, rank: int, points: Points, hidden_size: int, dtype: str, device: torch.device
    ) -> None:
        spool, ids = Spool(Path(config.spool)), config.residual_ids
        self._rank = rank
        self._aux = ids[:-1]
        self._hidden_size = hidden_size
        facts = DumpFacts(config.server, config.state_fingerprint, ids, hidden_size, dtype)
        task = WritingTask(
            rank=rank,
            writers=config.writers if rank == 0 else 1,
            blocks=_BLOCKS if rank == 0 else _BLOCKS_FOR_CANARIES,
            block_bytes=_BLOCK_BYTES,
            spool=config.spool,
            spool_bytes=config.spool_bytes,
            facts=facts,
            probe_facts=replace(facts, residual_ids=self._aux),
        )
        ring = Ring(device, task)
        self.transfer = Transfer(device, config.backlog_bytes, ring)
        self.monitor = Monitor(spool.counters(rank), config.server, rank, self.transfer, ring)
        self._pass: _Pass | None = None
        self._dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
        points.norm.register_forward_hook(self._after_final_norm)
        points.logits_processor.register_forward_pre_hook(self._before_logits, with_kwargs=True)
        for residual_id in self._aux:
            probe_layer_input(points.layers[residual_id], partial(self._probe, residual_id))
        (spool.canary / f"rank-{rank}").mkdir(mode=0o700, exist_ok=True)

    @property
    def device_bytes_per_token(self) -> int:
        """Device memory that a token takes until it is copied: SGLang's auxiliary states, ours with the final one, its id."""
        slots = len(self._aux)
        return (2 * slots + 1) * self._hidden_size * self._dtype.itemsize + TOKEN_BYTES

    @contextmanager
    def batch(self, forward_batch: Any) -> Iterator[None]:
        """Around one forward pass of the scheduler."""
        with self.monitor.on_scheduler():
            self._pass = self._begin(forward_batch) if forward_batch.forward_mode.is_extend() and forward_batch.rids else None
        try:
            yield
        finally:
            current, self._pass = self._pass, None
            if current is not None and not current.submitted:
                self._fail(current, "not_captured", "the forward pass ended without states")

    def _begin(self, forward_batch: Any) -> _Pass | None:
        """Note our requests in a batch; those of samples on rank 0 alone, those of the canary on every rank."""
        rids = [rid for rid in map(parse_rid, forward_batch.rids) if rid and (self._rank == 0 or rid.kind is Kind.CANARY)]
        if not rids:
            return None
        try:
            found = segments(forward_batch.rids, forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)
            ours = [one for one in found if one.rid in rids]
            return _Pass(ours, forward_batch.input_ids) if ours else None
        except Exception as error:  # the clients learn of it by their samples' failure records
            self.transfer.fail(rids, "capture_error", repr(error))
            return None

    def _fail(self, current: _Pass, reason: str, detail: str) -> None:
        self.transfer.fail((segment.rid for segment in current.segments), reason, detail)

    def _after_final_norm(self, _module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._pass is not None:
            self._pass.final = output[1] if isinstance(output, tuple) else args[0]

    def _probe(self, residual_id: int, stream: torch.Tensor) -> None:
        if self._pass is not None and self._pass.has_canary:
            with suppress(Exception):  # no memory: then the canary's probe is missing, and the forward pass goes on
                self._pass.probed[residual_id] = stream.clone()  # later layers add to it in place

    def _before_logits(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current = self._pass
        if current is None:
            return
        current.submitted = True
        try:
            with self.monitor.on_scheduler():
                aux = kwargs["aux_hidden_states"] if "aux_hidden_states" in kwargs else args[_AUX_ARGUMENT]
                token_ids = current.token_ids.to(torch.int32, copy=True)
                states = self._stack(aux, current.final)
                current.check(states, token_ids)
                self.transfer.submit(StatesBatch(current.segments, token_ids, states, row_checksums(states)))
                if current.has_canary:
                    self._submit_probes(current, token_ids)
        except Exception as error:  # the clients learn of it by their samples' failure records
            self._fail(current, "capture_error", repr(error))

    def _submit_probes(self, current: _Pass, token_ids: torch.Tensor) -> None:
        probed = torch.stack([current.probed[i] for i in self._aux], dim=1)
        canaries = [segment for segment in current.segments if segment.rid.kind is Kind.CANARY]
        self.transfer.submit(StatesBatch(canaries, token_ids, probed, row_checksums(probed), probe=True))

    def _stack(self, aux: Any, final: torch.Tensor | None) -> torch.Tensor:
        """All states of a pass, [T, K+1, H], from the model's auxiliary ones (packed [T, K*H], or a list of [T, H])."""
        slots = len(self._aux)
        if final is None or aux is None:
            raise WireError("the model gave no states", where="logits processor", got=f"aux {type(aux)}, final {type(final)}")
        if not isinstance(aux, torch.Tensor):
            aux = torch.cat(list(aux), dim=-1)
        rows, width = aux.shape
        if width != slots * self._hidden_size or final.shape != (rows, self._hidden_size) or aux.dtype != self._dtype:
            raise WireError(
                "the model gave other states than asked",
                where="logits processor",
                expected=f"{slots} + 1 slots of {self._hidden_size} in {self._dtype}",
                got=f"aux {tuple(aux.shape)} {aux.dtype}, final {tuple(final.shape)}",
            )
        return torch.cat([aux.view(rows, slots, self._hidden_size), final.unsqueeze(1)], dim=1)
