"""What is on disk stays readable: today's code writes the golden files byte for byte, and reads them.

A change that these tests see needs a new version constant, and new golden files: python -m hs_assets_tests.test_golden
Fields that are added, and that those who read without them pass over, need no new version: then the file of before stays too.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import tensorstore as ts
import zarr

from hs_assets.capture import assembly
from hs_assets.capture.assembly import DumpFacts
from hs_assets.store.arrays import open_array
from hs_assets.store.dtype import as_bits
from hs_assets.store.layout import STORE_VERSION, StorePaths, check, create
from hs_assets.store.manifest import (
    MANIFEST_VERSION,
    Ledger,
    Manifest,
    Part,
    PromptsVersion,
    StoredSample,
    UnstoredRow,
    read_manifest,
)
from hs_assets.store.summary import ManifestSummary, find_summary
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets.wire.dump import DUMP_VERSION, DumpLayout, read_layout, token_sha256
from hs_assets.wire.records import WIRE_VERSION, ClaimRecord, CommitRecord
from hs_assets.wire.rid import Kind, Rid
from hs_assets_tests.dump_material import add_chunks, made_spool, make_assembly

GOLDEN = Path(__file__).with_name("golden")
FILES = [
    "dump.safetensors",
    "dump.commit.json",
    "manifest.json",
    "store.zarr.json",
    "residual_002/zarr.json",
    "residual_002/c/0/0",
    "compressed/zarr.json",
]
BEFORE = ["manifest.without_counts.json"]
"""Files as earlier code of the same version wrote them."""
COMPRESSED = "compressed/c/0/0"
"""A shard that is only read: another version of zstd may make other bytes."""
TOKEN_IDS = np.array([7, 163_839, 0], "<i4")
STATES = (np.arange(3 * 3 * 4, dtype="<u2") * 1777 + 0x3C00).reshape(3, 3, 4)  # the bits of bfloat16 [T, K+1, H]
SMOOTH = (np.arange(40 * 64, dtype="<u2") * 1777 % 256 + 0x3F00).astype("<u2").reshape(40, 64)  # bfloat16 from 0.5 to 2
RID = Rid(Kind.SAMPLE, "0123abcd", "demo-00000", 17, 3)
COMMITTED_AT = 1_760_000_000.125
MANIFEST = Manifest(
    partition="demo-00000",
    layer_set="r2-4-8",
    state_fingerprint="0123456789abcdef",
    state_spec={"model_path": "moonshotai/Kimi-K2.5", "tensor_parallel": 8},
    prompts=PromptsVersion("prompts-1", "demo", "/data/démo.jsonl", "a" * 64, "b" * 64),
    rows=3,
    samples=(
        StoredSample(
            "demo-00000/0017",
            17,
            "c" * 64,
            3,
            2,
            token_sha256(TOKEN_IDS.tobytes()),
            0,
            (Part("20260101T000000-0123abcd", 0, (2, 4, 8), (1.5, 2.0, 3.25), 123, "server-1", "run-1", COMMITTED_AT),),
        ),
    ),
    unstored=(
        UnstoredRow("demo-00000/0018", 18, "d" * 64, "dropped", "too_long", "9000 tokens", 0),
        UnstoredRow("demo-00000/0019", 19, "e" * 64, "failed", "finite", "slot 1, token 7", 1),
    ),
)


def write_files(folder: Path) -> None:
    """Write all golden files as today's code does."""
    spool, store = made_spool(folder / "spool"), create(folder / "store")
    files = spool.dump(str(RID))
    ClaimRecord(files.rid, 0, 1, 0.0).write(files.claim)
    facts = DumpFacts("server-1", "0123456789abcdef", (2, 4, 8), 4, "BF16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly.time, "time", lambda: COMMITTED_AT)
        add_chunks(make_assembly(facts, spool), files, RID, TOKEN_IDS, STATES, [2, 3])
    MANIFEST.write(store)
    writer = GenerationWriter(store, "0123456789abcdef", "demo-00000", (2,), 8, ArrayShape(4, "BF16", 2, 4))
    writer.append(TOKEN_IDS, {2: STATES[:, 0].view(ml_dtypes.bfloat16)})
    generation = store.generation("0123456789abcdef", "demo-00000", writer.publish())
    shape = ArrayShape(64, "BF16", 16, 48, "blosc")
    writer = GenerationWriter(store, "0123456789abcdef", "demo-00001", (8,), 8, shape)
    writer.append(np.zeros(len(SMOOTH), np.int32), {8: SMOOTH.view(ml_dtypes.bfloat16)})
    compressed = store.generation("0123456789abcdef", "demo-00001", writer.publish()) / "final"
    sources = {
        "dump.safetensors": files.data,
        "dump.commit.json": files.commit,
        "manifest.json": store.manifest("r2-4-8", "demo-00000"),
        "store.zarr.json": store.root / "zarr.json",
        "residual_002/zarr.json": generation / "residual_002" / "zarr.json",
        "residual_002/c/0/0": generation / "residual_002" / "c" / "0" / "0",
        "compressed/zarr.json": compressed / "zarr.json",
        COMPRESSED: compressed / "c" / "0" / "0",
    }
    for name in (*FILES, COMPRESSED):
        (folder / "golden" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources[name], folder / "golden" / name)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("today")
    write_files(folder)
    return folder / "golden"


def test_versions():
    """Raise one of these only together with new golden files, and with code that still reads the old ones."""
    assert (WIRE_VERSION, DUMP_VERSION, STORE_VERSION, MANIFEST_VERSION) == (2, "1", 1, 1)


def test_versions_in_the_files():
    with safetensors.safe_open(GOLDEN / "dump.safetensors", "numpy") as file:
        assert file.metadata()["version"] == DUMP_VERSION
    assert json.loads((GOLDEN / "dump.commit.json").read_text())["version"] == WIRE_VERSION
    assert json.loads((GOLDEN / "manifest.json").read_text())["version"] == MANIFEST_VERSION
    assert json.loads((GOLDEN / "store.zarr.json").read_text())["attributes"] == {"hs_assets_store_version": STORE_VERSION}


def test_there_is_no_other_golden_file():
    assert sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()) == sorted(
        [*FILES, *BEFORE, COMPRESSED]
    )


@pytest.mark.parametrize("name", FILES)
def test_the_same_bytes_are_written(written, name):
    assert (written / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_the_dump_is_read():
    assert read_layout(GOLDEN / "dump.safetensors") == DumpLayout(3, (2, 4, 8), 4, "BF16")
    tensors = dict(safetensors.deserialize((GOLDEN / "dump.safetensors").read_bytes()))
    assert (tensors["hidden_states"]["dtype"], tensors["hidden_states"]["shape"]) == ("BF16", [3, 3, 4])
    assert bytes(tensors["hidden_states"]["data"]) == STATES.tobytes()
    assert bytes(tensors["token_ids"]["data"]) == TOKEN_IDS.tobytes()


def test_the_commit_record_is_read():
    assert CommitRecord.read(GOLDEN / "dump.commit.json") == CommitRecord(
        rid="hs.s.0123abcd.demo-00000.0017.T3",
        server="server-1",
        state_fingerprint="0123456789abcdef",
        residual_ids=(2, 4, 8),
        tokens=3,
        hidden_size=4,
        dtype="BF16",
        bytes=4096 + 72 + 12,
        row_checksums_crc32=211_967_820,
        token_sha256="db316a10fc55c0e25e6e56ad1da7b0de85520084a65099c1185e26c52433f6a7",
        chunks=2,
        committed_at=COMMITTED_AT,
    )


@pytest.mark.parametrize("name", ["manifest.json", *BEFORE])
def test_the_manifest_is_read(name, tmp_path):
    assert read_manifest(GOLDEN / name) == MANIFEST
    place = StorePaths(tmp_path).manifest("r2-4-8", "demo-00000")
    place.parent.mkdir(parents=True)
    shutil.copyfile(GOLDEN / name, place)
    ledger = Ledger(3, 1, {"too_long": 1}, {"finite": 1})
    assert find_summary(StorePaths(tmp_path), "r2-4-8", "demo-00000") == ManifestSummary("0123456789abcdef", ledger, 3, 3)
    assert json.loads((GOLDEN / name).read_text())["ledger"] == {
        "in": 3,
        "stored": 1,
        "dropped": {"too_long": 1},
        "failed": {"finite": 1},
    }


def test_the_store_is_recognised(tmp_path):
    shutil.copyfile(GOLDEN / "store.zarr.json", tmp_path / "zarr.json")
    assert check(tmp_path).root == tmp_path


@pytest.mark.parametrize(("name", "states"), [("residual_002", STATES[:, 0]), ("compressed", SMOOTH)])
def test_the_state_arrays_are_read(name, states):
    assert np.array_equal(as_bits(zarr.open_array(GOLDEN / name, mode="r"))[:], states)
    assert np.array_equal(open_array(GOLDEN / name).read().view("<u2"), states)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{GOLDEN / name}/"}}
    assert np.array_equal(np.asarray(ts.open(spec).result().read().result()).view("<u2"), states)


def test_the_compressed_array_is_compressed():
    assert (GOLDEN / COMPRESSED).stat().st_size < 0.85 * SMOOTH.nbytes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        write_files(Path(temporary))
        shutil.copytree(Path(temporary, "golden"), GOLDEN, dirs_exist_ok=True)
