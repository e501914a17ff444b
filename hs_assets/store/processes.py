"""Processes that work beside this one."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """In a worker: end as soon as the process that asked for it is gone, also where that was killed and could tell nobody."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this process is nobody's worker")

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
