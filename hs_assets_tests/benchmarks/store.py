"""What a trainer waits for: writing samples and reading them in random order, ours against what it replaces, in one run.

    python -m hs_assets_tests.benchmarks.store [--gib 4] [--folder DIR] [--repeats 3] [--captured STORE] [--json FILE]

Needs torch, safetensors and tensorstore beside the package. Samples have four states of 7168 bf16 a token and 1600 tokens on
average. Each measurement is a process of its own; CPU seconds are those of the process and its workers, user and system, a
GB (1e9 bytes) of states. A write ends where its writer ends; ours alone has it on disk then. ``warm``: from the page cache, the
median of `--repeats`, as with the two writes that a bar compares; ``cold``: after the cache was told to drop the files, which a
tmpfs does not do. ``--captured``: a store of real states, uncompressed, such as ``hs-assets demo --model SMOLLM2`` makes; they
are compressed as the pipeline does.

How much a copy from a map takes depends on how large the pages are that the cache happens to hold the file in: what was read
through the map comes in small ones, what was just written in large ones, and then the copy takes half as long. So each is read
cold before it is read warm.

Exits with 1 where a bar is not met: reading ours uncompressed at most 1.5 of the raw copy and below torch.load; writing it at
most 2 of safetensors; compressed real states at most 0.72 of their size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hs_assets.store import open_store
from hs_assets.store.layout import create, sync
from hs_assets.store.manifest import Manifest, Part, PromptsVersion, StoredSample
from hs_assets.store.masks import write_masks
from hs_assets.store.reader import open_generation
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets.training import BatchOrder, BatchStream, Collator, StateDataset, StateLoader
from hs_assets.wire.dump import token_sha256

LAYERS, WIDTH, LAYER_SET, MEAN, LONGEST = (3, 31, 59, 61), 7168, "r3-31-59-61", 1600, 8192
PARTITION_SAMPLES = 64
BF16 = np.dtype(ml_dtypes.bfloat16)
Lengths = list[int]


def make_lengths(gib: float) -> Lengths:
    """Log-normal lengths whose mean is 1600, as many as fill `gib`."""
    random, tokens = np.random.default_rng(1), int(gib * 2**30 / (len(LAYERS) * WIDTH * 2))
    count = max(4, round(tokens / MEAN))
    lengths = np.clip(random.lognormal(np.log(MEAN) - 0.32, 0.8, count), 64, LONGEST)
    return [int(n) for n in np.clip(lengths * (MEAN * count / lengths.sum()), 64, LONGEST)]


def make_samples(lengths: Lengths) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids int32 [L], bits uint16 [4, L, 7168]) of each sample; cheap to make, so that making them is not what is measured."""
    random = np.random.default_rng(2)
    pool = random.standard_normal((LONGEST // 4, WIDTH), np.float32).astype(BF16).view(np.uint16)
    for length in lengths:
        rows = (np.arange(length) + int(random.integers(len(pool)))) % len(pool)
        yield random.integers(0, 160_000, length).astype(np.int32), np.stack([pool[(rows + i) % len(pool)] for i in range(4)])


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


# Writing: from samples in memory to files that are there. Each gives a generator that takes one sample at a time.


def write_raw(folder: Path, lengths: Lengths) -> Iterator[None]:
    files = [(folder / f"{i}.bin").open("wb") for i in LAYERS]
    for _, bits in make_samples(lengths):
        yield
        for file, rows in zip(files, bits, strict=True):
            file.write(rows.data)
        yield
    for file in files:
        file.close()


def write_torch(folder: Path, lengths: Lengths) -> Iterator[None]:
    for number, (ids, bits) in enumerate(make_samples(lengths)):
        yield
        torch.save({"input_ids": torch.from_numpy(ids), "hidden_states": list(as_tensor(bits))}, folder / f"{number}.pt")
        yield


def write_safetensors(folder: Path, lengths: Lengths) -> Iterator[None]:
    from safetensors.torch import save_file

    for number, (ids, bits) in enumerate(make_samples(lengths)):
        states = {f"h{i}": rows for i, rows in zip(LAYERS, as_tensor(bits), strict=True)}
        yield
        save_file({"input_ids": torch.from_numpy(ids), **states}, folder / f"{number}.safetensors")
        yield


def write_zarr(folder: Path, lengths: Lengths) -> Iterator[None]:
    """zarr-python as it comes: an array a layer, chunks of 128 tokens, written sample by sample; its own default codec."""
    import zarr

    group = zarr.create_group(folder / "z")
    arrays = [group.create_array(str(i), shape=(sum(lengths), WIDTH), chunks=(128, WIDTH), dtype=np.uint16) for i in LAYERS]
    begin = 0
    for _, bits in make_samples(lengths):
        yield
        for array, rows in zip(arrays, bits, strict=True):
            array[begin : begin + len(rows)] = rows
        begin += bits.shape[1]
        yield


def write_tensorstore(folder: Path, lengths: Lengths) -> Iterator[None]:
    """Shards of 8192 tokens of chunks of 128 with crc32c, as ours; each sample is one transaction over all layers."""
    arrays = [open_tensorstore(folder / str(i), sum(lengths)) for i in LAYERS]
    begin = 0
    for _, bits in make_samples(lengths):
        yield
        writes = [array[begin : begin + bits.shape[1]].write(rows) for array, rows in zip(arrays, bits, strict=True)]
        for write in writes:
            write.result()
        begin += bits.shape[1]
        yield


def open_tensorstore(folder: Path, rows: int | None):
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    if rows is not None:
        crc, little = {"name": "crc32c"}, {"name": "bytes", "configuration": {"endian": "little"}}
        inner = {"chunk_shape": [128, WIDTH], "codecs": [little, crc], "index_codecs": [little, crc]}
        grid = {"name": "regular", "configuration": {"chunk_shape": [8192, WIDTH]}}
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
        spec |= {
            "metadata": {"shape": [rows, WIDTH], "data_type": "uint16", "chunk_grid": grid, "codecs": codecs},
            "create": True,
        }
    return tensorstore.open(spec).result()


def write_ours(folder: Path, lengths: Lengths, compression: str = "none") -> Iterator[None]:
    """As the pipeline: a generation for each partition of 64 samples, its masks and its manifest."""
    paths, samples = create(folder / "store.zarr"), make_samples(lengths)
    shape = ArrayShape(WIDTH, "BF16", 128, 8192, compression)
    for number in range(0, len(lengths), PARTITION_SAMPLES):
        partition, rows = f"bench-{number // PARTITION_SAMPLES:05d}", lengths[number : number + PARTITION_SAMPLES]
        writer, stored = GenerationWriter(paths, "0" * 16, partition, LAYERS, 61, shape), []
        for row in range(len(rows)):
            ids, bits = next(samples)
            yield
            offset = writer.append(ids, dict(zip(LAYERS, bits.view(BF16), strict=True)))
            part = Part(writer.name, offset, LAYERS, (1.0,) * 4, 0, "benchmark", "benchmark", 0.0)
            hashed = token_sha256(ids.data)
            stored.append(StoredSample(f"{partition}/{row:04d}", row, "0" * 64, len(ids), len(ids), hashed, row, (part,)))
            yield
        yield
        writer.publish()
        write_masks(paths, partition, "v", [np.ones(n, bool) for n in rows])
        prompts = PromptsVersion("v", "bench", "bench", "0" * 64, "0" * 64)
        Manifest(partition, LAYER_SET, "0" * 16, {}, prompts, len(rows), tuple(stored), ()).write(paths)
        yield


def write_ours_blosc(folder: Path, lengths: Lengths) -> Iterator[None]:
    return write_ours(folder, lengths, "blosc")


# Reading: gives a function that reads sample i, all layers, and returns its bytes.


def read_raw(folder: Path, lengths: Lengths) -> Callable[[int], int]:
    files = [np.memmap(folder / f"{i}.bin", np.uint16, "r").reshape(-1, WIDTH) for i in LAYERS]
    starts, out = np.concatenate([[0], np.cumsum(lengths)]), np.full((4, LONGEST, WIDTH), 1, np.uint16)

    def read(i: int) -> int:
        for file, rows in zip(files, out, strict=True):
            rows[: lengths[i]] = file[starts[i] : starts[i + 1]]
        return 4 * lengths[i] * WIDTH * 2

    return read


def read_torch(folder: Path, _: Lengths) -> Callable[[int], int]:
    return lambda i: sum(rows.nbytes for rows in torch.load(folder / f"{i}.pt", weights_only=True)["hidden_states"])


def read_safetensors(folder: Path, lengths: Lengths) -> Callable[[int], int]:
    """Copied out, as ours are: load_file alone maps the file and reads nothing."""
    from safetensors.torch import load_file

    out = torch.ones((4, LONGEST, WIDTH), dtype=torch.bfloat16)

    def read(i: int) -> int:
        states = [rows for name, rows in load_file(folder / f"{i}.safetensors").items() if name != "input_ids"]
        for rows, into in zip(states, out, strict=True):
            into[: lengths[i]] = rows
        return sum(rows.nbytes for rows in states)

    return read


def read_zarr(folder: Path, lengths: Lengths) -> Callable[[int], int]:
    import zarr

    group, starts = zarr.open_group(folder / "z", mode="r"), np.concatenate([[0], np.cumsum(lengths)])
    arrays = [group[str(i)] for i in LAYERS]
    return lambda i: sum(array[starts[i] : starts[i + 1]].nbytes for array in arrays)


def read_tensorstore(folder: Path, lengths: Lengths) -> Callable[[int], int]:
    arrays, starts = [open_tensorstore(folder / str(i), None) for i in LAYERS], np.concatenate([[0], np.cumsum(lengths)])

    def read(i: int) -> int:
        reads = [array[starts[i] : starts[i + 1]].read() for array in arrays]
        return sum(read.result().nbytes for read in reads)

    return read


def read_ours(folder: Path, _: Lengths) -> Callable[[int], int]:
    view = open_store(folder / "store.zarr").layer_set(LAYER_SET)
    out = {i: np.ones((LONGEST, WIDTH), BF16) for i in LAYERS}

    def read(i: int) -> int:
        manifest, sample = view.entries[i]
        view.store.ids_and_mask(manifest, sample)
        into = {layer: rows[: sample.tokens] for layer, rows in out.items()}
        return sum(rows.nbytes for rows in view.store.states(manifest, sample, out=into).values())

    return read


WRITERS: dict[str, Callable[[Path, Lengths], Iterator[None]]] = {
    "raw": write_raw,
    "torch": write_torch,
    "safetensors": write_safetensors,
    "zarr": write_zarr,
    "tensorstore": write_tensorstore,
    "ours": write_ours,
    "ours_blosc": write_ours_blosc,
}
READERS: dict[str, Callable[[Path, Lengths], Callable[[int], int]]] = {
    "raw": read_raw,
    "torch": read_torch,
    "safetensors": read_safetensors,
    "zarr": read_zarr,
    "tensorstore": read_tensorstore,
    "ours": read_ours,
    "ours_blosc": read_ours,
}


class FileSamples(Dataset):
    """A file a sample, as trainers read them."""

    def __init__(self, name: str, folder: Path, count: int) -> None:
        self.name, self.folder, self.count = name, folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        if self.name == "torch":
            return torch.load(self.folder / f"{i}.pt", weights_only=True)["hidden_states"]
        from safetensors.torch import load_file

        return [rows.clone() for name, rows in load_file(self.folder / f"{i}.safetensors").items() if name != "input_ids"]


# Measuring, each time in a process of its own


def spent() -> float:
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def figures(size: int, wall: float, cpu: float) -> dict[str, float]:
    return {"bytes": size, "MB/s": size / wall / 1e6, "CPU s/GB": cpu / size * 1e9}


def measure_write(name: str, folder: Path, lengths: Lengths) -> dict[str, float]:
    """Only what lies between two yields is counted: not the making of the samples."""
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    wall = cpu = 0.0
    steps = WRITERS[name](folder, lengths)
    for _ in steps:
        began, used = time.perf_counter(), spent()
        next(steps, None)
        wall, cpu = wall + time.perf_counter() - began, cpu + spent() - used
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        sync(path)  # a page that is not on disk yet cannot be dropped from the cache
    result = figures(sum(lengths) * 4 * WIDTH * 2, wall, cpu)
    result["files"] = len(files)
    result["size"] = sum(path.stat().st_size for path in files) / result["bytes"]
    return result


def measure_read(name: str, folder: Path, lengths: Lengths, cold: bool) -> dict[str, float]:
    for path in folder.rglob("*") if cold else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    torch.set_num_threads(1)
    read = READERS[name](folder, lengths)
    order = np.random.default_rng(3).permutation(len(lengths)).tolist()
    if not cold:
        read(order[-1])
    began, used, size = time.perf_counter(), spent(), 0
    for i in order:
        size += read(i)
    return figures(size, time.perf_counter() - began, spent() - used)


def measure_loader(name: str, folder: Path, lengths: Lengths, workers: int) -> dict[str, float]:
    """One sample a batch, at random; the first batch counts from the opening of the store or folder on."""
    torch.set_num_threads(1)
    began, used, size, first = time.perf_counter(), spent(), 0, 0.0
    if name == "ours":
        dataset = StateDataset(folder / "store.zarr", LAYER_SET)
        stream = BatchStream(dataset, BatchOrder.of(dataset, batch_size=1), Collator("pack", shift=False))
        batches = (batch["states"].values() for batch in StateLoader(stream, workers, context="fork"))
    else:
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        batches = iter(DataLoader(FileSamples(name, folder, len(lengths)), batch_size=None, shuffle=True, **options))
    for states in batches:
        size += sum(rows.nbytes for rows in states)
        first = first or time.perf_counter() - began
    del batches
    return {**figures(size, time.perf_counter() - began, spent() - used), "first batch s": first}


def measure_captured(store: Path, folder: Path) -> dict[str, float]:
    """Size of compressed real states, to that of the states, and the CPU seconds of writing and of reading them."""
    opened = open_store(store)
    entries = [entry for layer_set in opened.layer_sets()[:1] for entry in opened.layer_set(layer_set).entries]
    width, dtype = opened.state_layout(*entries[0])
    if dtype != BF16:
        sys.exit(f"{store} has {dtype} states")
    layers = tuple(sorted(i for part in entries[0][1].parts for i in part.residual_ids))
    paths = create(folder / "captured.zarr")
    writer = GenerationWriter(paths, "1" * 16, "real-00000", layers, layers[-1], ArrayShape(width, "BF16", 128, 8192, "blosc"))
    wrote = 0.0
    for entry in entries:
        sample = opened.sample(*entry)
        began = time.process_time()
        writer.append(sample.input_ids, sample.states)
        wrote += time.process_time() - began
    began = time.process_time()
    generation = paths.generation("1" * 16, "real-00000", writer.publish())
    wrote += time.process_time() - began
    arrays = list(open_generation(generation).states.values())
    stored = sum(array.shard_path(shard).stat().st_size for array in arrays for shard in range(array.shards))
    began = time.process_time()
    for array in arrays:
        array.read()
    read, gigabytes = time.process_time() - began, writer.bytes / 1e9
    tokens = float(sum(sample.tokens for _, sample in entries))
    return {"tokens": tokens, "size": stored / writer.bytes, "write s/GB": wrote / gigabytes, "read s/GB": read / gigabytes}


def alone(function: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def median(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in results) for key in results[0]}


def say(what: str, name: str, result: dict[str, float], results: list[dict[str, object]]) -> None:
    shown = "  ".join(f"{value:10.3f} {key}" for key, value in result.items() if key not in ("bytes", "raw"))
    print(f"{what:16} {name:12} {shown}", flush=True)
    results.append({"what": what, "name": name, **result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--folder", type=Path, help="where the files go [the system's temporary folder]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--captured", type=Path, help="a store of captured states, for their compressed size")
    parser.add_argument("--only", default=",".join(WRITERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names, lengths = options.only.split(","), make_lengths(options.gib)
    size, results = sum(lengths) * 4 * WIDTH * 2, []
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{len(lengths)} samples, mean {sum(lengths) / len(lengths):.0f} tokens, {size / 1e9:.2f} GB; {machine}")
    folder = Path(tempfile.mkdtemp(prefix="hs-assets-benchmark-", dir=options.folder))
    try:
        for name in names:
            writes = [alone(measure_write, name, folder / name, lengths)]
            for _ in range(options.repeats - 1 if name in ("ours", "safetensors") else 0):
                shutil.rmtree(folder / name)
                writes.append(alone(measure_write, name, folder / name, lengths))
            say("write", name, median(writes), results)
        for name in names:
            say("read cold", name, alone(measure_read, name, folder / name, lengths, True), results)
        warm: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(options.repeats):  # in turn, so that a busy moment of the machine is nobody's alone
            for name in names:
                warm[name].append(alone(measure_read, name, folder / name, lengths, False))
        for name in names:
            say("read warm", name, median(warm[name]), results)
        for workers in (0, 2):
            for name in [name for name in ("torch", "safetensors", "ours") if name in names]:
                say(f"loader {workers} workers", name, alone(measure_loader, name, folder / name, lengths, workers), results)
        if options.captured:
            say("real states", "ours_blosc", alone(measure_captured, options.captured, folder), results)
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "gigabytes": size / 1e9, "results": results}, indent=1))
    sys.exit(0 if bars_hold(results) else 1)


def bars_hold(results: list[dict[str, object]]) -> bool:
    found = {(one["what"], one["name"]): one for one in results}

    def cpu(what: str, name: str) -> float | None:
        return float(found[what, name]["CPU s/GB"]) if (what, name) in found else None

    read, copy, load = cpu("read warm", "ours"), cpu("read warm", "raw"), cpu("read warm", "torch")
    wrote, other = cpu("write", "ours"), cpu("write", "safetensors")
    real = found.get(("real states", "ours_blosc"))
    bars = [
        ("read, to the raw copy", read and copy and read / copy, 1.5),
        ("read, to torch.load", read and load and read / load, 1),
        ("write, to safetensors", wrote and other and wrote / other, 2),
        ("compressed real states", real and float(real["size"]), 0.72),
    ]
    for name, value, limit in bars:
        print(f"bar: {name}: {'not measured' if value is None else f'{value:.2f}, at most {limit}'}")
    return all(value is None or value <= limit for _, value, limit in bars)


if __name__ == "__main__":
    main()
