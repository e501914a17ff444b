"""Kill writers at any moment, and look at what they leave: python -m hs_assets_tests.killed_writers STORE KILLS

Each writer is a fork that writes one partition again and again, each time another generation and manifest. Prints JSON:
``published``: kills after which the partition had a manifest; ``cut``: kills that left something that no manifest names.
Exits with an error where a sample that a manifest names is not what was written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hs_assets.store import open_store
from hs_assets.store.disposal import Garbage
from hs_assets.store.gc import collect
from hs_assets.store.layout import StorePaths, create
from hs_assets.store.verify import verify
from hs_assets.wire.dump import token_sha256
from hs_assets_tests.store_material import LAYERS, PROMPTS, bits, make_partition, make_samples

LENGTHS = [8, 5, 12]
SEEDS = range(300)


def main(root: Path, kills: int) -> None:
    paths, moments = create(root), random.Random(5)
    made = [make_samples(LENGTHS, seed=seed) for seed in SEEDS]
    by_hash = {token_sha256(next(iter(one.input_ids.values())).tobytes()): one for one in made}
    assert len(by_hash) == len(SEEDS)
    published, cut, round_seconds = 0, 0, 0.05
    for number in range(kills):
        partition, rounds = f"demo-{number % 7:05d}", moments.randrange(3)
        took = kill_one(paths, partition, 3 * number, rounds, moments.uniform(0, 1.2) * round_seconds)
        round_seconds = took / rounds if rounds > 1 else round_seconds
        store = open_store(root)
        for manifest in store.manifests(LAYERS.id) if LAYERS.id in store.layer_sets() else ():
            states = by_hash[manifest.samples[0].token_sha256]
            for entry, expected in zip(manifest.samples, states.states.values(), strict=True):
                sample = store.sample(manifest, entry)
                assert all(np.array_equal(bits(sample.states[i]), bits(expected[i])) for i in LAYERS.residual_ids)
            published += manifest.partition == partition
        garbage = list(collect(paths, root.parent / "locks", min_age=0, delete=True))
        assert all(isinstance(one, Garbage) for one in garbage), garbage
        cut += any(".staging-" in one.path.name or one.path.name.endswith(".tmp") for one in garbage)
        if number % 10 == 9:
            assert [problem for one in verify(store, 1) for problem in one.problems] == []
    print(json.dumps({"published": published, "cut": cut}))


def kill_one(paths: StorePaths, partition: str, seed: int, rounds: int, after: float) -> float:
    """Start a writer, and kill it so many seconds after it has written so often; returns how long it took for that."""
    told, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        for number in itertools.count(seed):
            os.write(tell, b"!")
            number %= len(SEEDS)
            prompts = dataclasses.replace(PROMPTS, version=f"prompts-{number}")
            make_partition(paths, LENGTHS, partition=partition, seed=number, prompts=prompts)
    os.read(told, 1)
    began = time.monotonic()
    for _ in range(rounds):
        os.read(told, 1)
    took = time.monotonic() - began
    time.sleep(after)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    os.close(told)
    os.close(tell)
    return took


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
