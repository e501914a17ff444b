"""CPU seconds that a partition costs outside SGLang's processes, beside those of an empty Dagster run launched in the same way.

    python -m hs_assets_tests.benchmarks.overhead [PARTITIONS]

A `dagster dev` with its daemon runs partitions of the demo, and as many of an asset that does nothing, one at a time; the
server is up before. A run's process counts with all its children. Of the webserver, the daemon and the code server it is what
they take above what they take when nothing runs. Afterwards one partition is extracted in a process that samples itself by CPU
time, to see where it goes. The CPU engine must be installed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import psutil
from rich import box
from rich.table import Table

from hs_assets.config import Project, load_project
from hs_assets.console import make_console
from hs_assets.defs.build import build_definitions
from hs_assets.defs.demo import open_instance, prepare
from hs_assets.serving.launch import make_launch_plan, resolve
from hs_assets.serving.server import lease_server, stop_server
from hs_assets.serving.state import ServerFolder
from hs_assets_tests.benchmarks.cpu_profile import print_profile
from hs_assets_tests.dagster_dev import DagsterDev, dagster_dev

IDLE_SECONDS = 20
RUNS = "the run's process and its children"
ROLES = {
    "dagster_webserver": "webserver",
    "dagster._daemon": "daemon",
    "code-server start": "code servers",
    "api grpc": "code servers",
}

EMPTY = """import dagster as dg

@dg.asset(partitions_def=dg.StaticPartitionsDefinition([str(i) for i in range(100)]))
def nothing() -> None:
    pass

defs = dg.Definitions([nothing], jobs=[dg.define_asset_job("empty", [nothing])], executor=dg.in_process_executor)
"""
WORKSPACE = """load_from:
  - python_module: {module_name: hs_assets.definitions, location_name: hs_assets}
  - python_file: {relative_path: empty.py, location_name: empty}
"""
LAUNCH = """mutation ($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""

Seconds = Counter[str]
"""Role → CPU seconds."""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty.py").write_text(EMPTY)
        (folder / "workspace.yaml").write_text(WORKSPACE)
        project = load_project(folder / ".hs_assets", "preset:demo")
        prepare(project, say)
        try:
            measure(project, folder, count)
        finally:
            stop_server(ServerFolder(project.home.server), say, force=True)


def measure(project: Project, folder: Path, count: int) -> None:
    definitions = build_definitions(project)
    keys = definitions.resolve_job_def("extract").partitions_def.get_partition_keys()
    assert count < len(keys), f"the demo has {len(keys)} partitions, of which one warms up and one is profiled"
    server = lease_server(ServerFolder(project.home.server), make_launch_plan(project, resolve(project)), "benchmark", say)
    with open_instance(project.home) as instance, server, dagster_dev(folder) as dev:
        assert definitions.resolve_job_def("record_layer_set").execute_in_process(instance=instance).success
        bench = Bench(project, dev, instance)
        bench.run("empty", "0")
        bench.run("extract", keys[0])
        idle = bench.spent(lambda: time.sleep(IDLE_SECONDS))
        empty = bench.spent(lambda: [bench.run("empty", str(1 + i)) for i in range(count)])
        full = bench.spent(lambda: [bench.run("extract", key) for key in keys[1 : 1 + count]])
        print_table(idle, empty, full, count)
    print_profile(project.home.root, keys[-1])


class Bench:
    """Runs jobs by the webserver and the daemon, and reads what their processes took."""

    def __init__(self, project: Project, dev: DagsterDev, instance: dg.DagsterInstance) -> None:
        self._dev = dev
        self._instance = instance
        self._folder = ServerFolder(project.home.server)

    def run(self, job: str, partition: str) -> None:
        """One run, until its process has ended."""
        location = "empty" if job == "empty" else "hs_assets"
        selector = {"repositoryLocationName": location, "repositoryName": "__repository__", "pipelineName": job}
        tags = [{"key": "dagster/partition", "value": partition}]
        params = {"selector": selector, "mode": "default", "executionMetadata": {"tags": tags}}
        launched = self._dev.ask(LAUNCH, params=params)["launchPipelineExecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run_id = launched["run"]["runId"]
        while True:
            run = self._instance.get_run_by_id(run_id)
            assert run is not None
            if run.is_finished and not any(_is_run(child) for server in self._code_servers() for child in server.children()):
                break
            time.sleep(0.3)
        assert run.is_success, f"{job} of {partition} failed: {run_id}"

    def spent(self, work: Callable[[], object]) -> tuple[Seconds, float]:
        """CPU seconds by role, and seconds, that passed while something was done."""
        before, began = self._cpu(), time.monotonic()
        work()
        after = self._cpu()
        return Counter({role: after[role] - before[role] for role in after}), time.monotonic() - began

    def _cpu(self) -> Seconds:
        """CPU seconds up to now; those of processes that ended are their parent's."""
        seconds: Seconds = Counter()
        for process in psutil.Process(self._dev.pid).children(recursive=True):
            words = _words(process)
            for word, role in ROLES.items():
                if word in words:
                    times = process.cpu_times()
                    seconds[role] += times.user + times.system
        for server in self._code_servers():
            times = server.cpu_times()
            seconds[RUNS] += times.children_user + times.children_system
        state = self._folder.read_state()
        assert state is not None
        times = psutil.Process(state.watchdog_pid).cpu_times()
        seconds["watchdog of SGLang"] += times.user + times.system
        return seconds

    def _code_servers(self) -> list[psutil.Process]:
        processes = psutil.Process(self._dev.pid).children(recursive=True)
        return [process for process in processes if "api grpc" in _words(process)]


def _words(process: psutil.Process) -> str:
    """A process's command line; of one that has just ended nothing."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _is_run(process: psutil.Process) -> bool:
    """Whether it is a run's process, perhaps one that has ended and is yet to be waited for."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or "spawn_main" in _words(process)
    except psutil.NoSuchProcess:
        return False


def print_table(idle: tuple[Seconds, float], empty: tuple[Seconds, float], full: tuple[Seconds, float], count: int) -> None:
    """CPU seconds a run: of an empty one, of a partition, and what a partition takes above it."""
    console, table = make_console(), Table("CPU seconds a run", "empty", "partition", "above it", box=box.SIMPLE)
    roles = [*dict.fromkeys([RUNS, *ROLES.values(), *full[0]])]
    columns = [{role: (spent[role] - idle[0][role] / idle[1] * wall) / count for role in roles} for spent, wall in (empty, full)]
    for role in roles:
        table.add_row(role, *(f"{column[role]:.2f}" for column in columns), f"{columns[1][role] - columns[0][role]:+.2f}")
    sums = [sum(column.values()) for column in columns]
    table.add_row("together", *(f"{one:.2f}" for one in sums), f"{sums[1] - sums[0]:+.2f}", style="bold")
    table.add_row("seconds from launch to end", f"{empty[1] / count:.1f}", f"{full[1] / count:.1f}", "")
    console.print(table)


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
