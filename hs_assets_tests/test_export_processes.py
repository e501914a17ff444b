"""Several partitions at once: the same bytes as one after the other, and what fails takes nothing else with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from hs_assets.cli import main
from hs_assets.errors import ExportError, StoreError
from hs_assets.exports.export import Exported, choose_manifests
from hs_assets.exports.folder import ExportFolder
from hs_assets.exports.processes import export_partitions
from hs_assets.exports.summary import begin, finish
from hs_assets.exports.trainer import ExportSample, Trainer
from hs_assets.exports.trainers import SPECFORGE, SPECULATORS
from hs_assets.store import Store, open_store
from hs_assets_tests.conftest import write_project
from hs_assets_tests.export_material import FINGERPRINT, HIDDEN, LAYERS, VOCABULARY, put_store
from hs_assets_tests.store_material import flip_byte

LENGTHS = {"chats-00000": [37, 400], "chats-00001": [9], "chats-00002": [120, 3, 8], "chats-00003": [1000]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home") / "store.zarr"
    put_store(root, LENGTHS)
    return root


def export(store: Store, trainer: Trainer, root: Path, processes: int, told: list[tuple[str, int]]) -> list[Exported]:
    manifests, folder = choose_manifests(store, LAYERS.id), ExportFolder(root)
    begin(folder, manifests[0], trainer)
    done: list[Exported] = []
    try:
        done.extend(export_partitions(store, manifests, trainer, folder, lambda *sample: told.append(sample), processes))
    finally:
        finish(folder, trainer, manifests[0], done, None)
    return done


def hashes(root: Path) -> dict[str, str]:
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("trainer", [SPECFORGE, SPECULATORS], ids=["specforge", "speculators"])
def test_the_same_files_whatever_the_number(root: Path, tmp_path: Path, trainer: Trainer) -> None:
    store, told = open_store(root), {n: list[tuple[str, int]]() for n in (1, 3)}
    done = {n: export(store, trainer, tmp_path / str(n), n, told[n]) for n in told}
    assert hashes(tmp_path / "1") == hashes(tmp_path / "3")
    assert sorted(done[1], key=lambda one: one.partition) == sorted(done[3], key=lambda one: one.partition)
    assert sorted(told[1]) == sorted(told[3])
    assert sum(tokens for _, tokens in told[3]) == sum(map(sum, LENGTHS.values()))
    again = export(store, trainer, tmp_path / "3", 2, [])
    assert {one.state for one in again} == {"identical"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"], "nothing unfinished is left beside them"


def test_one_that_fails_is_named_and_the_others_are_whole(tmp_path: Path) -> None:
    store, _ = put_store(tmp_path / "store.zarr", LENGTHS)
    (generation,) = (store.paths.root / "data" / FINGERPRINT / "chats-00001").iterdir()
    flip_byte(generation / "final" / "c" / "0" / "0", 5)
    with pytest.raises(StoreError, match=r"chats-00001/0000, residual id 8(.|\n)*checksum is wrong"):
        export(store, SPECULATORS, tmp_path / "out", 2, [])
    there = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert "chats-00001" not in there
    assert there == set(json.loads((tmp_path / "out" / "hs_assets_export.json").read_text())["partitions"])
    assert "chats-00000" in there, "it had begun when the other failed"
    flip_byte(generation / "final" / "c" / "0" / "0", 5)
    assert {one.partition for one in export(store, SPECULATORS, tmp_path / "out", 2, []) if one.state == "written"} == {
        *LENGTHS
    } - there


def test_interrupted_it_begins_no_other(tmp_path: Path) -> None:
    lengths = {f"chats-{i:05d}": [50] for i in range(16)}
    store, _ = put_store(tmp_path / "store.zarr", lengths)
    manifests, folder = choose_manifests(store, LAYERS.id), ExportFolder(tmp_path / "out")
    begin(folder, manifests[0], SPECFORGE)
    exporting = export_partitions(store, manifests, SPECFORGE, folder, lambda *_: None, 2)
    first = next(exporting)
    exporting.close()
    there = {path.name for path in folder.root.iterdir() if path.is_dir()}
    assert first.partition in there
    assert len(there) < len(lengths)


KILLED = """
import sys
from pathlib import Path
from hs_assets.store import open_store
from hs_assets_tests.test_export_processes import SPECFORGE, export

if __name__ == "__main__":
    export(open_store(sys.argv[1]), SPECFORGE, Path(sys.argv[2]), 2, [])
"""


def alive(session: int) -> list[str]:
    """Names of the processes of a session that have not ended."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, fields = path.read_text().rpartition(")")
            stats.append((name, fields.split()))
    return [name for name, fields in stats if fields[0] != "Z" and int(fields[3]) == session]


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["its processes end with it", "all at once"])
@pytest.mark.parametrize("after", [0.0, 0.2])
def test_killed_it_leaves_whole_partitions_alone(
    root: Path, tmp_path: Path, after: float, kill: Callable[[int, int], None]
) -> None:
    """What it left is taken up by the next export."""
    (tmp_path / "killed.py").write_text(KILLED)
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path / "killed.py"), str(root), str(out)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / ".out.unfinished").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(after)
    kill(process.pid, signal.SIGKILL)
    process.wait()
    while (left := alive(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    for folder in (path for path in out.glob("*") if path.is_dir()):  # it may not even have begun
        body = json.loads((folder / "hs_assets_export.json").read_text())
        assert {entry["file"]: entry["sha256"] for entry in body["samples"]} == {
            name: sha256 for name, sha256 in hashes(folder).items() if name != "hs_assets_export.json"
        }
    export(open_store(root), SPECFORGE, out, 2, [])
    export(open_store(root), SPECFORGE, tmp_path / "fresh", 1, [])
    assert hashes(out) == hashes(tmp_path / "fresh")


def test_the_command(root: Path, tmp_path: Path) -> None:
    model, source, home = tmp_path / "model", tmp_path / "chats.jsonl", tmp_path / "home"
    for folder in (model, home):
        folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS.final, "hidden_size": HIDDEN}
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY, "max_position_embeddings": 4096}))
    source.write_text('{"row": 0}\n')
    project = write_project(home, model, source, top=f"layers = {list(LAYERS.aux)}", store=f'path = "{root}"')
    words = ["export", "modelopt", str(tmp_path / "out"), "--processes", "2", "--json", "--home", str(project.home.root)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert [one["partition"] for one in body["exported"]] == list(LENGTHS)
    assert (body["samples"], body["tokens"]) == (7, sum(map(sum, LENGTHS.values())))
    assert CliRunner().invoke(main, [*words[:4], "0"]).exit_code == 2


def kill_this_process(*_: object) -> Iterator[tuple[ExportSample, Path]]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def test_a_process_that_is_killed_is_an_error_that_says_so(root: Path, tmp_path: Path) -> None:
    """As the system does for want of memory."""
    killed = dataclasses.replace(SPECFORGE, write=kill_this_process)
    with pytest.raises(ExportError, match=r"was killed(.|\n)*memory(.|\n)*fewer --processes"):
        export(open_store(root), killed, tmp_path / "out", 2, [])
    assert {one.state for one in export(open_store(root), SPECFORGE, tmp_path / "out", 2, [])} == {"written"}


AT_ONCE = """
import os
import time

if __name__ != "__main__":  # in a process that exports: one of two comes late
    time.sleep(os.getpid() % 2 * 0.5)
else:
    import sys
    from pathlib import Path
    from hs_assets.exports.export import choose_manifests
    from hs_assets.exports.folder import ExportFolder
    from hs_assets.exports.processes import export_partitions
    from hs_assets.exports.summary import begin
    from hs_assets.exports.trainers import SPECULATORS
    from hs_assets.store import open_store

    store, folder = open_store(sys.argv[1]), ExportFolder(Path(sys.argv[2]))
    manifests = choose_manifests(store, "r2-4-6-8")
    begin(folder, manifests[0], SPECULATORS)
    for _ in range(4):
        list(export_partitions(store, manifests, SPECULATORS, folder, lambda *_: None, 2))
"""


def test_what_is_done_before_the_last_process_is_up_ends_without_a_word(tmp_path: Path) -> None:
    put_store(tmp_path / "store.zarr", {"chats-00000": [5], "chats-00001": [6]})
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    command = [sys.executable, str(tmp_path / "at_once.py"), str(tmp_path / "store.zarr"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
