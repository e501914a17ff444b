"""Several ranks on whatever machine this runs: who writes, what the canary sees of a plain hook, and the death of a rank.

    python -m hs_assets_tests.benchmarks.ranks --model PATH --python SGLANG_PYTHON --tensor-parallel 2 [--machine-args "…"]

Exits with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hs_assets.config import Project
from hs_assets.errors import HandshakeError, ServerDiedError, ServerStartError
from hs_assets.serving import canary
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings
from hs_assets.serving.launch import Target, make_launch_plan, resolve
from hs_assets.serving.server import lease_server, stop_server
from hs_assets.serving.state import LaunchPlan, ServerFolder, ServerState
from hs_assets.wire.records import ReadyRecord
from hs_assets.wire.spool import Spool
from hs_assets_tests import faulty_capture
from hs_assets_tests.benchmarks.capture import machine_of, make_prompts, project_of, say
from hs_assets_tests.plugins import make_plugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default="")
    parser.add_argument("--layers", default="1, 3, 5")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--unproven", default="")
    parser.add_argument("--fault", default="plain_hook", help="partial_sums on the CPU, which fuses no all-reduce")
    parser.add_argument("--machine-args", default="")
    parser.set_defaults(writers=4, spool_gib=0, store="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fault = Path(folder) / "fault"
        os.environ[faulty_capture.FAULT_ENV] = str(fault)
        os.environ["PYTHONPATH"] = make_plugin(Path(folder) / "plugin", Path(faulty_capture.__file__))
        arguments.plugin = os.environ["PYTHONPATH"]
        project = project_of(Path(folder), arguments)
        target = resolve(project)
        print(machine_of(str(target.python), target))
        try:
            good = _all_hold(project, target, fault, arguments)
        finally:
            stop_server(ServerFolder(project.home.server), say, force=True)
            shutil.rmtree(project.spool_path, ignore_errors=True)
    sys.exit(not good)


def _all_hold(project: Project, target: Target, fault: Path, arguments: argparse.Namespace) -> bool:
    folder, spool = ServerFolder(project.home.server), Spool(project.spool_path)
    with lease_server(folder, make_launch_plan(project, target), "ranks", say) as state:
        print(f"up in {time.time() - state.started_at:.0f} s: {state.message}")
        ready = [ReadyRecord.read(spool.ready_record(rank)) for rank in range(arguments.tensor_parallel)]
        print(f"ready records of ranks {[one.rank for one in ready]}; rank {[one.rank for one in ready if one.writes]} writes")
        faults = ((arguments.fault, ()), (arguments.fault, ("probe",)), ("partial_sums", ("probe", "ranks")))
        seen = [_caught(folder, state, ready, fault, name, without) for name, without in faults]
        killed = _kill_one(folder, state, target, ready[-1].pid)
    return all(seen) and killed and _refuses_dp(project, arguments)


def _caught(
    folder: ServerFolder, state: ServerState, ready: list[ReadyRecord], fault: Path, name: str, without: tuple[str, ...]
) -> bool:
    """Whether the canary fails with the fault, and passes without it, some of its checks left out."""
    plan, saved = LaunchPlan.read(folder.plan), (canary._compare_probe, canary._compare_ranks)
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    canary._compare_probe = nothing if "probe" in without else saved[0]
    canary._compare_ranks = nothing if "ranks" in without else saved[1]
    left_out = f" without the comparison of {' and '.join(without)}" if without else ""
    try:
        passed = canary.run_canary(plan, state, ready)
        fault.write_text(name)
        try:
            print(f"{name}{left_out}: NOT CAUGHT: {canary.run_canary(plan, state, ready)}")
        except HandshakeError as error:
            print(f"{name}{left_out}: {error.problem}: {error.got}; healthy: {passed}")
            return True
        return False
    finally:
        fault.unlink(missing_ok=True)
        canary._compare_probe, canary._compare_ranks = saved


def _kill_one(folder: ServerFolder, state: ServerState, target: Target, pid: int) -> bool:
    """Whether the death of a rank ends the run soon, with an error that says so, and leaves nothing behind."""
    captured, killed = 0, 0.0
    try:
        with CaptureClient(folder, state, target.layout, ClientSettings(16, 120, 60), say) as client:
            for outcome in client.capture("killed", make_prompts("equal", 512, 512 * 400, target.facts.vocab_size)):
                if isinstance(outcome, Captured):
                    captured += 1
                    outcome.files.free()
                if captured == 40 and not killed:
                    killed = time.monotonic()
                    threading.Thread(target=os.kill, args=(pid, signal.SIGKILL)).start()
    except ServerDiedError as error:
        left = list(Spool(Path(state.spool)).dumps.iterdir())
        took = time.monotonic() - killed
        print(f"a rank killed: {captured} captured, {len(left)} files left, known after {took:.1f} s: {str(error)[:160]!r}")
        return not left
    print("a rank killed: NOBODY NOTICED")
    return False


def _refuses_dp(project: Project, arguments: argparse.Namespace) -> bool:
    """Whether DP attention is refused by name."""
    arguments.machine_args += f" --enable-dp-attention --dp-size {arguments.tensor_parallel}"
    again = project_of(project.home.root, arguments)
    try:
        with lease_server(ServerFolder(again.home.server), make_launch_plan(again, resolve(again)), "ranks", say):
            print("DP attention: NOT REFUSED")
            return False
    except ServerStartError as error:
        print(f"DP attention: {str(error)[:300]!r}")
        return "--dp-size" in str(error)


if __name__ == "__main__":
    main()
