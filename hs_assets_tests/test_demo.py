"""The demo as a newcomer runs it: the real command, the real SGLang, a real Dagster instance, and the UI's server after it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from hs_assets.config import load_project
from hs_assets.samples.tokenizer import load_tokenizer
from hs_assets.serving.state import ServerFolder
from hs_assets.store import open_store
from hs_assets_tests.conftest import DEMO_TEXTS, temporary_home
from hs_assets_tests.dagster_dev import CHECKOUT, dagster_dev

BAD_ROWS = {
    "duplicate": 2,
    "empty_row": 1,
    "invalid_json": 1,
    "no_assistant_turn": 3,
    "token_out_of_vocab": 1,
    "truncated_before_supervision": 1,
}


def hs_assets(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hs_assets.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def demo(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A home in which the demo ran, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    with temporary_home(folder / ".hs_assets") as home:
        result = hs_assets("demo", "--home", home)
        assert result.returncode == 0, result.stderr
        yield home, result.stdout


def prefill_lines(home: Path) -> int:
    """How many prefill batches the home's servers have logged."""
    logs = ServerFolder(home / "server").logs.glob("sglang-*.log")
    return sum(log.read_text(errors="replace").count("Prefill batch") for log in logs)


def test_every_row_is_accounted_for_and_bad_ones_have_reasons(demo: tuple[Path, str]) -> None:
    home, printed = demo
    result = hs_assets("status", "--json", "--home", home)
    assert result.returncode == 0
    partitions = json.loads(result.stdout)["partitions"]
    assert [one["partition"] for one in partitions] == [f"demo-{i:05d}" for i in range(5)]
    for one in partitions:
        assert one["in"] == one["stored"] + sum(one["dropped"].values()) + sum(one["failed"].values())
        assert (one["state"], one["failed"], one["pending"]) == ("complete", {}, 0)
    assert sum(one["in"] for one in partitions) == len(DEMO_TEXTS.read_bytes().splitlines()) == 69
    assert sum(one["stored"] for one in partitions) == 60
    reasons: dict[str, int] = {}
    for one in partitions:
        for reason, count in one["dropped"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    assert reasons == BAD_ROWS
    assert re.search(r"60 samples, [\d,]+ tokens, [\d,]+ bytes of states in .*; [\d,]+ tokens/s captured now", printed)
    assert "what to type next" in printed


def test_lineage_leads_from_a_sample_to_its_row(demo: tuple[Path, str]) -> None:
    home, printed = demo
    assert "demo-00000/0000 in layer set r2-4-5-8" in printed
    sample_id = "demo-00002/0005"
    record = json.loads(hs_assets("lineage", sample_id, "--json", "--home", home).stdout)
    row = Path(record["source_path"]).read_bytes().split(b"\n")[record["source_row"]]
    assert hashlib.sha256(row).hexdigest() == record["source_sha256"]
    parsed = json.loads(row)
    last = parsed.get("messages", parsed.get("conversations"))[-1]
    answer = last.get("content", last.get("value"))
    project = load_project(home)
    (sample,) = [s for s in open_store(project.store_path).layer_set("r2-4-5-8") if s.sample_id == sample_id]
    tokenizer = load_tokenizer(project.settings.model.path)
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]).endswith(answer + "<|im_end|>")
    chain = hs_assets("lineage", sample_id, "--home", home).stdout
    assert f"row {record['source_row']}" in chain.splitlines()[-1]
    assert hs_assets("lineage", "demo-00002/9999", "--home", home).returncode == 1


def test_stored_bytes_hold_and_tensorstore_reads_the_same(demo: tuple[Path, str]) -> None:
    home, _ = demo
    result = hs_assets("verify", "--home", home)
    assert (result.returncode, result.stdout) == (0, "60 samples hold, 0 problems\n")
    sample = open_store(home / "store.zarr").layer_set("r2-4-5-8")[7]
    part, partition = sample.lineage.parts[0], sample.lineage.partition
    folder = home / "store.zarr" / "data" / sample.lineage.state_fingerprint / partition / part.generation
    for residual_id, states in sample.states.items():
        name = "final" if residual_id == 8 else f"residual_{residual_id:03d}"
        array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / name)}}).result()
        assert array.dtype == ts.bfloat16
        theirs = array[part.offset : part.offset + len(states)].read().result()
        assert (theirs.view(np.uint16) == states.view(np.uint16)).all()


def test_running_it_again_asks_nothing_and_writes_nothing(demo: tuple[Path, str]) -> None:
    home, _ = demo
    before = {path: path.stat().st_mtime_ns for path in (home / "store.zarr").rglob("*")}
    requests = prefill_lines(home)
    assert requests > 0
    result = hs_assets("demo", "--home", home)
    assert result.returncode == 0, result.stderr
    assert "nothing had to be captured" in result.stdout
    assert prefill_lines(home) == requests
    assert {path: path.stat().st_mtime_ns for path in (home / "store.zarr").rglob("*")} == before


def test_a_subset_of_the_layers_asks_nothing(demo: tuple[Path, str], tmp_path: Path) -> None:
    home, _ = demo
    config = tmp_path / "subset.toml"
    text = (CHECKOUT / "hs_assets" / "presets" / "demo.toml").read_text()
    text = text.replace('layers = "eagle3"', "layers = [4]").replace('path = "demo"', f'path = "{home}/models/demo"')
    config.write_text(text)
    requests, arrays = prefill_lines(home), set((home / "store.zarr" / "data").rglob("*"))
    result = hs_assets("demo", "--home", home, "--config", config)
    assert result.returncode == 0, result.stderr
    assert (prefill_lines(home), set((home / "store.zarr" / "data").rglob("*"))) == (requests, arrays)
    store = open_store(home / "store.zarr")
    assert store.layer_sets() == ["r2-4-5-8", "r4-8"]
    assert [list(sample.states) for sample in store.layer_set("r4-8")[:2]] == [[4, 8], [4, 8]]


def test_dagster_dev_shows_the_filled_partitions(demo: tuple[Path, str]) -> None:
    """`dagster dev` in the folder of the home, with the checkout's own workspace.yaml and dagster.yaml."""
    home, _ = demo
    with dagster_dev(home.parent) as dev:
        answer = dev.ask(
            """{ assetNodes { assetKey { path } partitionStats { numPartitions numMaterialized numFailed }
            assetMaterializations(limit: 1) { metadataEntries { label } } } }"""
        )
    nodes = {"/".join(node["assetKey"]["path"]): node for node in answer["assetNodes"]}
    exports = {"vocabulary_mapping", "speculators_dataset"}
    exports |= {f"{trainer}_export" for trainer in ("specforge", "speculators", "speculators_legacy", "modelopt")}
    assert set(nodes) == {"layer_set", "prompts", "raw_dumps", "eagle3_samples", *exports}
    for name in ("prompts", "raw_dumps", "eagle3_samples"):
        assert nodes[name]["partitionStats"] == {"numPartitions": 5, "numMaterialized": 5, "numFailed": 0}
    latest = nodes["eagle3_samples"]["assetMaterializations"][0]
    labels = {entry["label"] for entry in latest["metadataEntries"]}
    assert {"rows", "stored", "dropped", "tokens", "bytes", "norm of residual 8", "store"} <= labels
