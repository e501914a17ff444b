"""Batches on their way to a GPU: from pinned memory, right although it is used again, and how fast. Needs CUDA.

    python -m hs_assets_tests.benchmarks.pinned [--gib 1] [--folder DIR]

Checked, with 0 and 2 workers: the states of every batch lie in pinned memory, and what is on the device afterwards is bit for
bit what was written. Measured: GB/s from the store to the device, and of the copy alone from pinned and from other memory.
Nothing of this runs where there is no CUDA, in CI neither: exit status 2 then, 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from hs_assets.training import BatchOrder, BatchStream, Collator, StateDataset, StateLoader
from hs_assets_tests.benchmarks.store import LAYER_SET, LAYERS, as_tensor, make_lengths, make_samples, write_ours


def to_device(folder: Path, workers: int, expected: dict[str, list[int]]) -> bool:
    """Move an epoch to the device; returns whether all of it was pinned and arrived as it was written."""
    dataset = StateDataset(folder / "store.zarr", LAYER_SET)
    stream = BatchStream(dataset, BatchOrder.of(dataset, batch_size=1), Collator("pack", shift=False))
    pinned, sums, size, began = True, {}, 0, time.perf_counter()
    for batch in StateLoader(stream, workers, pin_memory=workers > 0, context="forkserver" if workers else None):
        states = list(batch["states"].values())
        pinned &= all(rows.is_pinned() for rows in states)
        moved = [rows.to("cuda", non_blocking=True) for rows in states]
        sums[batch["sample_ids"][0]] = [checksum(rows[0]) for rows in moved]  # waits for the copies
        size += sum(rows.nbytes for rows in states)
    seconds = time.perf_counter() - began
    right = sums == expected
    print(f"{workers} workers: pinned {pinned}, as written {right}, {size / seconds / 1e9:.2f} GB/s from the store to the device")
    return pinned and right


def checksum(rows: torch.Tensor) -> int:
    """Of the bits of states [L, H], where they lie: each times its place, modulo 2^31."""
    bits = rows.contiguous().view(torch.int16).to(torch.int64).reshape(-1) & 0xFFFF
    places = torch.arange(1, len(bits) + 1, device=bits.device) & 0xFFFF
    return int((bits * places).remainder(2**31 - 1).sum().remainder(2**31 - 1))


def copy_alone(pinned: bool, size: int = 1 << 28) -> float:
    """GB/s of a copy to the device."""
    source, target = torch.ones(size, dtype=torch.uint8, pin_memory=pinned), torch.empty(size, dtype=torch.uint8, device="cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 10 * size / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--folder", type=Path, help="where the store goes [the system's temporary folder]")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA here: nothing was checked", file=sys.stderr)
        sys.exit(2)
    lengths = make_lengths(options.gib)
    samples = enumerate(make_samples(lengths))
    expected = {f"bench-{i // 64:05d}/{i % 64:04d}": [checksum(as_tensor(rows)) for rows in bits] for i, (_, bits) in samples}
    folder = Path(tempfile.mkdtemp(prefix="hs-assets-benchmark-", dir=options.folder))
    try:
        for _ in write_ours(folder, lengths):
            pass
        print(
            f"{torch.cuda.get_device_name()}, {len(lengths)} samples of {np.mean(lengths):.0f} tokens, {len(LAYERS)} states each"
        )
        holds = [to_device(folder, workers, expected) for workers in (0, 2)]
        print(f"the copy alone: {copy_alone(True):.1f} GB/s from pinned memory, {copy_alone(False):.1f} from other")
    finally:
        shutil.rmtree(folder)
    sys.exit(0 if all(holds) else 1)


if __name__ == "__main__":
    main()
