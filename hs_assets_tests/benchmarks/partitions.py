"""Many filled partitions on SQLite: seconds to load the definitions, of `status`, and of a tick of `reextract_stale`.

    python -m hs_assets_tests.benchmarks.partitions [PARTITIONS]

All lies in memory, so that filling it takes no hour. The model is a config.json beside weights of some bytes, the store
holds manifests alone; the CPU engine must be installed.
"""

from __future__ import annotations

import datetime
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from hs_assets.config import Project
from hs_assets.defs.build import build_definitions
from hs_assets.defs.layer_set import record
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import SAMPLES, SPEC_CURRENT
from hs_assets.defs.reextract import REEXTRACT_STALE
from hs_assets.extraction.status import source_indexes, status
from hs_assets.samples.sources import partition_keys
from hs_assets.serving.launch import Target, resolve
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.manifest import Manifest, Part, PromptsVersion, StoredSample
from hs_assets_tests.conftest import write_project

SAMPLES_EACH = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 8,
    "vocab_size": 480,
    "max_position_embeddings": 4096,
}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        project = make_project(folder, count)
        timed("index of the source, once", lambda: source_indexes(project))
        defs = build_definitions(project)
        (folder / "dagster").mkdir()
        with dg.DagsterInstance.local_temp(str(folder / "dagster"), overrides={"telemetry": {"enabled": False}}) as instance:
            fill(project, instance)
            resolve(project)
            timed(f"definitions load, {count:,} partitions", lambda: build_definitions(project).get_repository_def())
            timed("status", lambda: status(project))
            timed("tick, nothing stale", lambda: tick(project, defs, instance))
            config = project.home.config
            config.write_text(config.read_text().replace("layers = [2, 4]", "layers = [2, 5]"))
            timed("tick after a change, all stale", lambda: tick(project, defs, instance))
            timed("tick, all stale", lambda: tick(project, defs, instance))


def make_project(folder: Path, count: int) -> Project:
    model, home, rows = folder / "model", folder / "home", folder / "rows.jsonl"
    model.mkdir()
    home.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    rows.write_text("".join(f'{{"messages": [{i}]}}\n' for i in range(count)))
    return write_project(home, model, rows, top="layers = [2, 4]", prompts="rows_per_partition = 1")


def fill(project: Project, instance: dg.DagsterInstance) -> None:
    """Every partition materialised and checked, and a manifest of 64 samples for it, as large as a usual one."""
    target, paths = resolve(project), create(project.store_path)
    record(instance, target)
    fingerprint, layer_set = target.spec.fingerprint, target.layer_set
    keys = partition_keys(source_indexes(project))
    text = _manifest(target, keys[0], paths)
    for key in keys:
        version = {"dagster/data_version": f"{fingerprint}/{layer_set.id}/{'0' * 16}"}
        instance.report_runless_asset_event(dg.AssetMaterialization(SAMPLES, partition=key, tags=version))
        checked = dg.AssetCheckEvaluation(SAMPLES, SPEC_CURRENT, passed=True, partition=key)
        instance.report_runless_asset_event(checked)
        paths.manifest(layer_set.id, key).write_text(text.replace(keys[0], key))


def _manifest(target: Target, key: str, paths: StorePaths) -> str:
    """What a partition's manifest says, the partition's key aside."""
    ids = target.layer_set.residual_ids
    part = Part("generation", 0, ids, (1.0,) * len(ids), 0, "server", "run", 0.0)
    samples = tuple(
        StoredSample(f"{key}/{row:04d}", row, "0" * 64, 100, 50, "0" * 64, row, (part,)) for row in range(SAMPLES_EACH)
    )
    prompts = PromptsVersion("0" * 16, "rows", "rows.jsonl", "0" * 64, "0" * 64)
    Manifest(key, target.layer_set.id, target.spec.fingerprint, {}, prompts, SAMPLES_EACH, samples, ()).write(paths)
    return paths.manifest(target.layer_set.id, key).read_text()


def tick(project: Project, defs: dg.Definitions, instance: dg.DagsterInstance) -> None:
    repository = defs.get_repository_def()
    resource = ProjectResource(home=str(project.home.root), config=project.origin)
    now = datetime.datetime.now(datetime.UTC)
    with dg.build_schedule_context(
        instance=instance, repository_def=repository, resources={"project": resource}, scheduled_execution_time=now
    ) as context:
        asked = repository.get_schedule_def(REEXTRACT_STALE).evaluate_tick(context).run_requests
    print(f"    {len(asked or ())} runs are asked for")


def timed(what: str, work: Callable[[], object]) -> None:
    with stopwatch(what):
        work()


@contextmanager
def stopwatch(what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    print(f"{time.perf_counter() - wall:8.2f} s ({time.process_time() - cpu:.2f} s of CPU)  {what}", flush=True)


if __name__ == "__main__":
    main()
