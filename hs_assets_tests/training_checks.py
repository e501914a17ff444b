"""Tests of hs_assets.training; test_training.py runs them where torch is."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hs_assets.errors import StoreError
from hs_assets.store.layout import create
from hs_assets.store.writer import ArrayShape
from hs_assets.training import BatchOrder, BatchStream, Collator, StateDataset, StateLoader
from hs_assets_tests.store_material import LAYERS, flip_byte, generation_folder, make_partition

# of machines with fewer cores than a test has workers
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LENGTHS = {f"demo-{n:05d}": lengths for n, lengths in enumerate([[5, 40, 7], [1, 9, 23, 12], [31], [8, 8, 8, 8, 8]])}


def torch_bits(states):
    return states.view(torch.int16).numpy().view(np.uint16)


def made_bits(states):
    return states.view(np.uint16)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store of four partitions, and what was put into it."""
    paths = create(tmp_path_factory.mktemp("store") / "s")
    parts = [make_partition(paths, lengths, partition=name, seed=n) for n, (name, lengths) in enumerate(LENGTHS.items())]
    ids, masks, states = {}, {}, {}
    for part in parts:
        ids |= part.input_ids
        masks |= part.masks
        states |= part.states
    return paths, ids, masks, states


@pytest.fixture
def dataset(made):
    return StateDataset(made[0].root, LAYERS.id)


# Samples and windows


def test_items_are_the_samples_in_order(dataset, made):
    _, ids, masks, states = made
    assert [sample.sample_id for sample in dataset] == list(ids)
    assert dataset.lengths == [len(one) for one in ids.values()]
    for sample in dataset:
        assert sample.input_ids.tolist() == ids[sample.sample_id].tolist()
        assert sample.loss_mask.tolist() == masks[sample.sample_id].tolist()
        for residual_id in (2, 4, 8):
            got = sample.states(residual_id)
            assert got.dtype == torch.bfloat16
            assert np.array_equal(torch_bits(got), made_bits(states[sample.sample_id][residual_id]))


def test_windows_share_a_token_and_lose_none(made):
    _, ids, _, states = made
    dataset = StateDataset(made[0].root, LAYERS.id, window=9)
    seen: dict[str, list[tuple[int, int]]] = {}
    for window in dataset:
        stop = window.start + len(window)
        seen.setdefault(window.sample_id, []).append((window.start, stop))
        assert window.input_ids.tolist() == ids[window.sample_id][window.start : stop].tolist()
        assert np.array_equal(torch_bits(window.states(4)), made_bits(states[window.sample_id][4][window.start : stop]))
    assert list(seen) == list(ids)
    assert seen["demo-00000/0001"] == [(0, 9), (8, 17), (16, 25), (24, 33), (32, 40)]
    assert seen["demo-00001/0001"] == [(0, 9)]
    assert seen["demo-00001/0003"] == [(0, 9), (8, 12)]
    rows = Counter()
    for batch in BatchStream(dataset, BatchOrder.of(dataset, batch_size=3), Collator("pack")):
        for number, sample_id in enumerate(batch["sample_ids"]):
            rows.update((sample_id, p) for p in batch["position_ids"][batch["document_ids"] == number].tolist())
    assert rows == Counter((name, p) for name, one in ids.items() for p in range(1, len(one)))


def test_random_access_by_name_and_tokens(dataset, made):
    _, ids, _, states = made
    part = dataset.find("demo-00001/0002", slice(5, 20))
    assert (part.start, len(part), part.lineage.source_row) == (5, 15, 2)
    assert part.input_ids.tolist() == ids["demo-00001/0002"][5:20].tolist()
    assert np.array_equal(torch_bits(part.states(8, slice(3, 7))), made_bits(states["demo-00001/0002"][8][8:12]))
    out = torch.zeros((4, 4), dtype=torch.bfloat16)
    assert part.states(8, slice(3, 7), out) is out
    assert torch.equal(out.view(torch.int16), part.states(8)[3:7].view(torch.int16))
    with pytest.raises(StoreError, match="no such sample"):
        dataset.find("demo-00001/0009")


def test_layer_selection(made):
    dataset = StateDataset(made[0].root, LAYERS.id, layers=[8, 2])
    assert list(Collator()([dataset[0]])["states"]) == [2, 8]
    with pytest.raises(StoreError, match="no such residual ids"):
        StateDataset(made[0].root, LAYERS.id, layers=[3])
    with pytest.raises(StoreError, match="no such layer set"):
        StateDataset(made[0].root, "r1-2-8")


def test_float32_states(tmp_path):
    paths = create(tmp_path / "s")
    made = make_partition(paths, [6, 3], shape=ArrayShape(4, "F32", 4, 8))
    batch = Collator("pad", shift=False)(list(StateDataset(paths.root, LAYERS.id)))
    states = batch["states"][4]
    assert states.dtype == torch.float32
    assert np.array_equal(states[1, :3].numpy().view(np.uint32), made.states["demo-00000/0001"][4].view(np.uint32))


# The collator


def shifted_example(tmp_path, **options):
    """Ids 0..9, tokens 4, 5 and 6 of the assistant, state of token t at layer i: 16 i + t."""
    paths = create(tmp_path / "s")
    made = make_partition(paths, [10])
    dataset = StateDataset(paths.root, LAYERS.id)
    sample = dataset[0]
    sample.input_ids[:] = torch.arange(10)
    sample.loss_mask[:] = False
    sample.loss_mask[4:7] = True
    return Collator(**options)([sample]), made.states["demo-00000/0000"]


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_the_shift(tmp_path, mode):
    batch, states = shifted_example(tmp_path, mode=mode)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch["loss_mask"].long().tolist() == [[0, 0, 0, 1, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert np.array_equal(torch_bits(batch["states"][2][0]), made_bits(states[2][:-1]))
    assert np.array_equal(torch_bits(batch["states"][4][0]), made_bits(states[4][:-1]))
    assert np.array_equal(torch_bits(batch["states"][8][0]), made_bits(states[8][1:]))


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({"mask_shift": 0}, [0, 0, 0, 0, 1, 1, 1, 0, 0]),
        ({"mask_shift": 2}, [0, 0, 1, 1, 1, 0, 0, 0, 0]),
        ({"shift": False}, [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]),
    ],
    ids=["SpecForge", "predicted", "none"],
)
def test_other_masks(tmp_path, options, mask):
    batch, states = shifted_example(tmp_path, **options)
    assert batch["loss_mask"].long().tolist() == [mask]
    if options.get("shift") is False:
        assert batch["input_ids"].tolist() == [list(range(10))]
        assert np.array_equal(torch_bits(batch["states"][8][0]), made_bits(states[8]))


def test_padding(dataset, made):
    """Samples of 5, 40 and 7 tokens, also where the memory held something else before."""
    _, ids, _, states = made
    collator = Collator("pad", shift=False, pad_id=99, multiple=16, reuse=1)
    collator([dataset[1]] * 3)["states"][2][:] = 7
    batch = collator([dataset[0], dataset[1], dataset[2]])
    assert batch["input_ids"].shape == (3, 48)
    assert batch["states"][2].shape == (3, 48, 4)
    for row, length in enumerate([5, 40, 7]):
        name = f"demo-00000/{row:04d}"
        assert batch["sample_ids"][row] == name
        assert batch["input_ids"][row].tolist() == ids[name].tolist() + [99] * (48 - length)
        assert batch["document_ids"][row].tolist() == [row] * length + [-1] * (48 - length)
        assert not batch["loss_mask"][row, length:].any()
        for residual_id, rows in batch["states"].items():
            assert np.array_equal(torch_bits(rows[row, :length]), made_bits(states[name][residual_id]))
            assert not torch_bits(rows[row, length:]).any()


def test_packing(dataset, made):
    """Samples of 5, 40 and 7 tokens: 4 + 39 + 6 rows, none of which is of two samples."""
    _, ids, _, states = made
    collator = Collator("pack", multiple=8, reuse=1)
    collator([dataset[1]] * 3)["states"][8][:] = 7
    batch = collator([dataset[0], dataset[1], dataset[2]])
    names = [f"demo-00000/{row:04d}" for row in range(3)]
    assert batch["document_ids"].tolist() == [[0] * 4 + [1] * 39 + [2] * 6 + [-1] * 7]
    assert batch["position_ids"][0, :49].tolist() == [*range(1, 5), *range(1, 40), *range(1, 7)]
    assert batch["input_ids"][0, :49].tolist() == [int(i) for name in names for i in ids[name][1:]]
    for residual_id, cut in ((2, slice(0, -1)), (8, slice(1, None))):
        expected = np.concatenate([states[name][residual_id][cut] for name in names])
        assert np.array_equal(torch_bits(batch["states"][residual_id][0, :49]), made_bits(expected))
        assert not torch_bits(batch["states"][residual_id][0, 49:]).any()


def test_a_sample_of_one_token_has_no_row(dataset):
    batch = Collator("pad")([dataset[3], dataset[0]])
    assert batch["document_ids"].tolist() == [[-1] * 4, [1] * 4]
    assert Collator("pack")([dataset[3]])["states"][8].shape == (1, 0, 4)


def test_memory_is_reused_as_often_as_said(dataset):
    for reuse, expected in ((0, 4), (1, 1), (2, 2)):
        collator = Collator(reuse=reuse)
        batches = [collator([dataset[1]]) for _ in range(4)]
        assert len({batch["states"][2].data_ptr() for batch in batches}) == expected


# The order


@pytest.mark.parametrize("cuda", [True, False])
def test_memory_is_pinned_where_there_is_cuda(dataset, monkeypatch, cuda):
    """What is asked of torch; that it then is pinned, and right on a device, benchmarks/pinned.py checks where CUDA is."""
    asked, empty = [], torch.empty

    def noted(*size, pin_memory=False, **options):
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch, "empty", noted)
    Collator("pack", reuse=2)([dataset[0]])
    assert asked == [cuda] * 3


def order(ranks=1, rank=0, **options):
    lengths = [length for lengths in LENGTHS.values() for length in lengths]
    numbers = [n for n, lengths in enumerate(LENGTHS.values()) for _ in lengths]
    return BatchOrder(tuple(lengths), tuple(numbers), rank=rank, ranks=ranks, **({"batch_size": 2} | options))


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"mix": 1}, {"batch_size": None, "batch_tokens": 20}])
def test_an_epoch_has_every_item_once(options):
    for epoch in range(3):
        assert sorted(i for batch in order(**options).batches(epoch) for i in batch) == list(range(13))


def test_epochs_and_seeds_differ_and_repeat():
    orders = {(seed, epoch): tuple(order(seed=seed).items(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert orders[1, 2] == tuple(order(seed=1).items(2))
    assert order(shuffle=False).items(1) == list(range(13))


def test_partitions_stay_together():
    """With mix 1 a partition comes whole, in any order; with 2 so do pairs; and partitions change places."""
    numbers = order().partitions
    firsts = set()
    for epoch in range(20):
        seen = [numbers[i] for i in order(mix=1).items(epoch)]
        assert len([1 for a, b in itertools.pairwise(seen) if a != b]) == 3
        firsts.add(seen[0])
        pairs = [numbers[i] for i in order(mix=2).items(epoch)]
        sizes = [len(LENGTHS[f"demo-{n:05d}"]) for n in dict.fromkeys(pairs)]
        assert len(set(pairs[: sizes[0] + sizes[1]])) == 2
    assert firsts == {0, 1, 2, 3}


def test_most_tokens_of_a_batch():
    for batch in order(batch_size=None, batch_tokens=20).batches(0):
        assert len(batch) == 1 or sum(order().lengths[i] for i in batch) <= 20


@pytest.mark.parametrize("ranks", [2, 3, 5, 20])
def test_ranks_share_an_epoch(ranks):
    shares = [order(ranks, rank).batches(4) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    whole = [tuple(batch) for batch in order().batches(4)]
    dealt = Counter(tuple(batch) for share in shares for batch in share)
    assert set(dealt) == set(whole)
    assert sum(dealt.values()) - len(whole) == order(ranks, 0).repeated(4)


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_tokens": 3}, {"batch_size": 0}, {"rank": 2, "ranks": 2}])
def test_orders_that_make_no_sense(options):
    with pytest.raises(ValueError, match=r"batch_size|rank"):
        order(**options)


# Streams and loaders


def loader(made, workers=0, context=None, ranks=1, rank=0, seed=3):
    dataset = StateDataset(made[0].root, LAYERS.id)
    stream = BatchStream(dataset, BatchOrder.of(dataset, batch_size=2, seed=seed, rank=rank, ranks=ranks), Collator("pack"))
    return StateLoader(stream, workers, context=context)


def content(batch):
    """A batch by value: its memory is used again."""
    states = {i: torch_bits(rows).tobytes() for i, rows in batch["states"].items()}
    return batch["sample_ids"], batch["input_ids"].tolist(), batch["loss_mask"].tolist(), states


def test_batches_are_what_was_stored(made):
    """Against what was handed to the writer, in the order that the batch names."""
    _, ids, _, states = made
    for batch in loader(made):
        for number, name in enumerate(batch["sample_ids"]):
            rows = batch["document_ids"][0] == number
            assert batch["input_ids"][0, rows].tolist() == ids[name][1:].tolist()
            assert np.array_equal(torch_bits(batch["states"][4][0, rows]), made_bits(states[name][4][:-1]))


@pytest.mark.parametrize(("workers", "context"), [(1, "fork"), (2, "fork"), (3, "forkserver")])
def test_workers_change_nothing(made, workers, context):
    alone, shared = loader(made), loader(made, workers, context)
    for _ in range(2):
        expected = [content(batch) for batch in alone]
        assert len(expected) == 7
        assert [content(batch) for batch in shared] == expected
    assert shared.state_dict() == alone.state_dict() == {**alone.state_dict(), "epoch": 2, "batches": 0}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_resume(made, workers, stop):
    """What comes after a state is what came after it before: the rest of the epoch, then the next one."""
    expected = [content(batch) for one in [loader(made)] for _ in range(2) for batch in one]
    first = loader(made, workers)
    for _, batch in zip(range(stop), first, strict=False):
        kept = content(batch)
    assert kept == expected[stop - 1]
    second = loader(made, workers)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    rest = [content(batch) for batch in second]
    rest += [content(batch) for batch in second]
    assert rest[: len(expected) - stop] == expected[stop:]


def test_resume_with_another_number_of_ranks(made):
    """Two ranks stop after two batches each; one rank goes on with the fifth batch."""
    pairs = [loader(made, ranks=2, rank=rank) for rank in range(2)]
    for one in pairs:
        for _, _ in zip(range(2), one, strict=False):
            pass
    states = [one.state_dict() for one in pairs]
    assert states[0] == states[1]
    alone = loader(made)
    expected = [content(batch) for batch in loader(made)]
    alone.load_state_dict(states[0])
    assert [content(batch) for batch in alone] == expected[4:]


def test_a_state_of_another_order_is_refused(made):
    with pytest.raises(ValueError, match="another order of batches"):
        loader(made, seed=3).load_state_dict(loader(made, seed=4).state_dict())


def test_with_the_tools_of_torch(made, dataset):
    """The map-style set with a DataLoader of its own, its batches from our order; and the stream in one."""
    order = BatchOrder.of(dataset, batch_size=2, seed=3)
    expected = [content(batch) for batch in loader(made)]
    plain = DataLoader(dataset, batch_sampler=order.batches(0), collate_fn=Collator("pack"), num_workers=2)
    assert [content(batch) for batch in plain] == expected
    stream = BatchStream(dataset, order, Collator("pack"))
    assert [content(batch) for batch in DataLoader(stream, batch_size=None, num_workers=2)] == expected


def test_damage_reaches_the_trainer(tmp_path):
    paths = create(tmp_path / "s")
    made = make_partition(paths, [24])
    flip_byte(generation_folder(paths, made) / "residual_004" / "c" / "1" / "0", 3)
    dataset = StateDataset(paths.root, LAYERS.id)
    stream = BatchStream(dataset, BatchOrder.of(dataset, batch_size=1), Collator())
    for workers in (0, 1):
        with pytest.raises(StoreError, match="states cannot be read") as caught:
            list(StateLoader(stream, workers))
        assert "demo-00000/0000, residual id 4" in str(caught.value)


def test_a_trainer_loads_neither_dagster_nor_zarr():
    code = "import sys, hs_assets.training; print(sorted({'dagster', 'zarr', 'pydantic', 'click'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
