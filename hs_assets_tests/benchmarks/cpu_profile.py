"""Where the CPU time of one partition goes: a process like that of a run, which samples its main thread by CPU time.

python -m hs_assets_tests.benchmarks.cpu_profile HOME PARTITION
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType

SAMPLE_SECONDS = 0.002


class CpuProfile:
    """Adds the CPU time between two samples to what the main thread was doing at the later one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._last = 0.0

    def __enter__(self) -> CpuProfile:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        now = time.process_time()
        self.seconds[_doing(frame)] += now - self._last
        self._last = now


def _doing(frame: FrameType | None) -> str:
    """What a stack is at, innermost first: an import, Dagster's storage, one of our modules, or Dagster."""
    files, imported = [], ""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "<module>" and not imported:
            imported = _package(name)
        files.append(name)
        frame = frame.f_back
    if any("importlib._bootstrap" in name for name in files):
        return f"importing {imported}"
    if any("/dagster/_core/storage/" in name for name in files):
        return "Dagster's storage of runs and events"
    ours = next((name for name in files if "/hs_assets/" in name and "/defs/" not in name), None)
    if ours is not None:
        return "hs_assets/" + ours.rsplit("/hs_assets/", 1)[1]
    return "Dagster" if any("/dagster/" in name for name in files) else "the rest"


def _package(file: str) -> str:
    for mark in ("/site-packages/", "/lib/python3.11/"):
        if mark in file:
            return file.rsplit(mark, 1)[1].split("/")[0].removesuffix(".py")
    return "hs_assets" if "/hs_assets/" in file else Path(file).name


def print_profile(home: Path, partition: str) -> None:
    """Extract a partition in a process of its own, and print what it spent where."""
    command = [sys.executable, "-m", "hs_assets_tests.benchmarks.cpu_profile", str(home), partition]
    print(subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout)


def main() -> None:
    home, partition = sys.argv[1:3]
    with CpuProfile() as profile:
        from hs_assets.config import load_project
        from hs_assets.defs.build import build_definitions
        from hs_assets.defs.demo import open_instance

        project = load_project(home)
        job = build_definitions(project).resolve_job_def("extract")
        with open_instance(project.home) as instance:
            assert job.execute_in_process(instance=instance, partition_key=partition).success
    print(f"CPU seconds of a process that extracts {partition}: {sum(profile.seconds.values()):.2f}, of which")
    for doing, seconds in profile.seconds.most_common(25):
        print(f"{seconds:8.2f}  {doing}")


if __name__ == "__main__":
    main()
