"""The store as torch data sets: shuffled, sharded and resumable, read straight into the batch. Needs torch and the store alone.

    from hs_assets.training import BatchOrder, BatchStream, Collator, StateDataset, StateLoader

    dataset = StateDataset(".hs_assets/store.zarr", "r2-4-5-8", window=4096)
    order = BatchOrder.of(dataset, batch_tokens=16_384, seed=0, rank=rank, ranks=world_size)
    loader = StateLoader(BatchStream(dataset, order, Collator("pack")), num_workers=2)
    for epoch in range(3):
        for batch in loader:                      # batch["states"]: {2: [1, T, H], 4: …, 5: …, 8: …}
            ...
            torch.save(loader.state_dict(), …)    # loader.load_state_dict(…) goes on with the next batch

    order.py     which samples make which batch, of which rank: seeded, the same in every process
    dataset.py   StateDataset: random access by sample and token window
    collate.py   Collator: pads or packs, and makes the EAGLE-3 shift
    stream.py    BatchStream (an IterableDataset of batches) and StateLoader (a DataLoader that knows where it is)

With torch's own tools: ``DataLoader(dataset, batch_sampler=order.batches(epoch), collate_fn=Collator())``.
"""

from hs_assets.training.collate import Collator
from hs_assets.training.dataset import Sample, StateDataset
from hs_assets.training.order import BatchOrder
from hs_assets.training.stream import BatchStream, StateLoader

__all__ = ["BatchOrder", "BatchStream", "Collator", "Sample", "StateDataset", "StateLoader"]
