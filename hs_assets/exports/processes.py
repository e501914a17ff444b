"""Several partitions at once, each by a process that holds no more than a few copies of one sample."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue

from hs_assets.errors import ExportError
from hs_assets.exports.export import Exported, Progress, export_partition
from hs_assets.exports.folder import ExportFolder
from hs_assets.exports.trainer import Trainer
from hs_assets.store import Store
from hs_assets.store.manifest import Manifest
from hs_assets.store.processes import end_with_parent

_SECONDS = 0.1
_told: SimpleQueue[tuple[str, int]]
"""In a process that exports: where it tells of each sample."""


def export_partitions(
    store: Store,
    manifests: Sequence[Manifest],
    trainer: Trainer,
    folder: ExportFolder,
    progress: Progress,
    processes: int | None = None,
) -> Generator[Exported, None, None]:
    """Export partitions as `export_partition` does, `processes` at once (by default one a core); gives each as it is done.

    Raises:
        ExportError, StoreError: of the first that failed, once those that had begun have ended and were given; or one of the
            processes was killed.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(manifests))
    if processes == 1:
        for manifest in manifests:
            yield export_partition(store, manifest, trainer, folder, progress)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    told: SimpleQueue[tuple[str, int]] = context.SimpleQueue()
    failed: BaseException | None = None
    pool = ProcessPoolExecutor(processes, context, _begin, (told,))
    running: set[Future[Exported]] = set()
    try:
        running = {pool.submit(_export, store, one, trainer, folder) for one in manifests}
        while running:
            done, running = wait(running, _SECONDS, FIRST_COMPLETED)
            while not told.empty():
                progress(*told.get())
            for one in done:
                if one.cancelled():
                    continue
                if (error := one.exception()) is None:
                    yield one.result()
                elif failed is None:
                    failed = _killed(folder) if isinstance(error, BrokenProcessPool) else error
                    for other in running:
                        other.cancel()
    finally:
        for one in running:  # where somebody interrupts, what has not begun does not
            one.cancel()
        while any(one.running() for one in running):  # and what has can still tell
            time.sleep(_SECONDS)
            while not told.empty():
                told.get()
        pool.shutdown()  # waits for processes that only start: without the queue they would end with a traceback
    if failed is not None:
        raise failed


def _killed(folder: ExportFolder) -> ExportError:
    return ExportError(
        "a process that exported was killed",
        where=folder.root,
        got="most often by the system, for want of memory",
        remedy="export again with fewer --processes: what is exported stays",
    )


def _begin(told: SimpleQueue[tuple[str, int]]) -> None:
    global _told
    _told = told
    end_with_parent()


def _export(store: Store, manifest: Manifest, trainer: Trainer, folder: ExportFolder) -> Exported:
    return export_partition(store, manifest, trainer, folder, lambda *sample: _told.put(sample))
