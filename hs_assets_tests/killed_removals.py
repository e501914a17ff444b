"""Kill the removal of a layer set, or of a partition, before each change that it makes to the disk, and see what is left.

python -m hs_assets_tests.killed_removals FOLDER (gc | remove) STEP

Of the changes every STEP-th is one.

After each kill whatever manifests name is read and compared with what was written, and the removal is run again: it must end
with just the files that one which nobody killed leaves. Prints the number of kills; exits with an error where anything differs.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hs_assets.store import open_store
from hs_assets.store.disposal import Garbage
from hs_assets.store.gc import collect, remove_partition
from hs_assets.store.generation import open_generation
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.verify import verify
from hs_assets_tests.store_material import OTHER, PARTITION, bits, make_partition, widen

HOUR = 3600.0
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def run_gc(paths: StorePaths) -> None:
    found = list(collect(paths, paths.root.parent / "locks", current=OTHER.id, min_age=HOUR, delete=True))
    assert all(isinstance(one, Garbage) for one in found), found


def run_remove(paths: StorePaths) -> None:
    found = list(remove_partition(paths, PARTITION, min_age=HOUR, delete=True))
    assert all(isinstance(one, Garbage) for one in found), found


def main(folder: Path, removal: Callable[[StorePaths], None], step: int) -> None:
    pattern = create(folder / "pattern.zarr")
    old = make_partition(pattern, [5, 20, 6])
    new = widen(pattern, old)
    expected = dict(states_of(pattern))
    assert {layer_set for layer_set, _, _ in expected} == {old.manifest.layer_set, new.layer_set}
    unhurt = copy(pattern)
    removal(unhurt)
    end, kills = files(unhurt), 0
    while True:
        paths = copy(pattern)
        if not killed_at(paths, removal, kills * step):
            break
        kills += 1
        assert [problem for one in verify(open_store(paths.root), 1) for problem in one.problems] == []
        for key, states in states_of(paths):
            assert np.array_equal(bits(states), bits(expected[key])), key
        removal(paths)
        assert files(paths) == end, (kills, set(files(paths)) ^ set(end))
        assert [problem for one in verify(open_store(paths.root), 1) for problem in one.problems] == []
    print(kills)


def states_of(paths: StorePaths):
    """All that can be read: (layer set, sample id, residual id) and the states."""
    open_generation.cache_clear()
    store = open_store(paths.root)
    for layer_set in store.layer_sets():
        for sample in store.layer_set(layer_set):
            yield from (((layer_set, sample.sample_id, i), states) for i, states in sample.states.items())


def copy(pattern: StorePaths) -> StorePaths:
    root = pattern.root.with_name("copy.zarr")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pattern.root, root)
    return StorePaths(root)


def files(paths: StorePaths) -> list[str]:
    """All files; when a partition was removed is not compared."""
    names = (path.relative_to(paths.root) for path in paths.root.rglob("*") if path.is_file())
    return sorted(str(name.parent if name.parts[0] == "removed" else name) for name in names)


def killed_at(paths: StorePaths, removal: Callable[[StorePaths], None], number: int) -> bool:
    """Run a removal in a fork that is killed before change `number`; False where it makes no more changes than that."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or (writes and str(paths.root) in str(arguments[0])):
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(hook)
        removal(paths)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"gc": run_gc, "remove": run_remove}[sys.argv[2]], int(sys.argv[3]))
