"""The plugin that SGLang loads by the entry-point group ``sglang.srt.plugins`` in each of its processes.

Without the environment variable ``HS_ASSETS_CAPTURE`` it does nothing. With it, each scheduler leaves a `ReadyRecord`
in the spool once its hooks are in place, or a `RefusedRecord` before it ends.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hs_assets.wire.records import CAPTURE_ENV, CAPTURE_VERSION, CaptureConfig, ReadyRecord, RefusedRecord
from hs_assets.wire.source import source_hash
from hs_assets.wire.spool import Spool

if TYPE_CHECKING:
    from hs_assets.capture.session import Session

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SESSION = "_hs_assets_session"
_DRAIN_SECONDS = 10.0


def register() -> None:
    """Entry point: hook into the model runner, if this server is to capture."""
    if CAPTURE_ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.load_model", _around_load_model, HookType.AROUND)
    HookRegistry.register(f"{_RUNNER}.forward", _around_forward, HookType.AROUND)


def _around_load_model(load_model: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    from hs_assets.capture.supported import violations
    from hs_assets.errors import RefusedError

    config = CaptureConfig.read(Path(os.environ[CAPTURE_ENV]))
    spool, rank = Spool(Path(config.spool)), torch.distributed.get_rank()
    reasons = violations(runner.server_args, importlib.metadata.version("sglang"), runner.model_config.hf_config.architectures[0])
    if reasons:
        RefusedRecord(config.server, rank, tuple(reasons)).write(spool.refused_record(rank))
        raise RefusedError("capture is refused on this server", got="; ".join(reasons))
    result = load_model(runner, *args, **kwargs)
    try:
        session, ready = _start(runner, config, rank)
    except RefusedError as error:
        RefusedRecord(config.server, rank, (str(error),)).write(spool.refused_record(rank))
        raise
    setattr(runner, _SESSION, session)
    signal.signal(signal.SIGTERM, partial(_on_term, session))
    ready.write(spool.ready_record(rank))
    return result


def _on_term(session: Session, number: int, _frame: FrameType | None) -> None:
    """Write what was captured, then end as the signal ends a process."""
    signal.signal(number, signal.SIG_DFL)

    def drain() -> None:
        with suppress(Exception):  # whatever goes wrong, it must end
            session.transfer.drain(_DRAIN_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=drain).start()  # a handler must not wait: it may have interrupted what it would wait for


def _around_forward(forward: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    session: Session | None = getattr(runner, _SESSION, None)
    if session is None:
        return forward(runner, forward_batch, *args, **kwargs)
    with session.batch(forward_batch):
        return forward(runner, forward_batch, *args, **kwargs)


def _start(runner: Any, config: CaptureConfig, rank: int) -> tuple[Session, ReadyRecord]:
    """Put the hooks into the loaded model; return the session and what to say of it."""
    import torch

    from hs_assets.capture.points import capture_layers, find_points
    from hs_assets.capture.session import Session
    from hs_assets.errors import RefusedError

    points = find_points(runner.model)
    *aux, final = config.residual_ids
    if final != len(points.layers):
        raise RefusedError("the final residual id is not the number of layers", expected=len(points.layers), got=final)
    if runner.model_config.hidden_size % 2:
        raise RefusedError("the hidden size is odd", got=runner.model_config.hidden_size, remedy="checksums go by 32-bit words")
    read_back = capture_layers(points, tuple(aux))
    dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[runner.dtype]
    model_config, chunk = runner.model_config, runner.server_args.chunked_prefill_size
    device = next(points.body.parameters()).device
    session = Session(config, rank, points, model_config.hidden_size, dtype, device)
    ready = ReadyRecord(
        server=config.server,
        capture_version=CAPTURE_VERSION,
        source_hash=source_hash(),
        sglang_version=importlib.metadata.version("sglang"),
        model_class=type(runner.model).__name__,
        residual_ids=(*read_back, final),
        num_layers=len(points.layers),
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        dtype=dtype,
        rank=rank,
        world_size=torch.distributed.get_world_size(),
        writes=rank == 0,
        hooks=("load_model", "forward", "final_norm", "logits_processor", *(f"input_norm_{i}" for i in aux)),
        chunk_tokens=chunk if chunk is not None and chunk > 0 else None,
        device_bytes_per_token=session.device_bytes_per_token,
        context_length=model_config.context_len,
        pid=os.getpid(),
        argv=tuple(sys.argv),  # multiprocessing gives each process that of the one that was started
    )
    return session, ready
