"""Run where torch is: batches whose rows of ours are far apart go through a real ring, and every block comes back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hs_assets.capture.assembly import DumpFacts
from hs_assets.capture.batch import Segment
from hs_assets.capture.checksums import row_checksums
from hs_assets.capture.messages import WritingTask
from hs_assets.capture.ring import Ring
from hs_assets.capture.transfer import StatesBatch, Transfer
from hs_assets.wire.records import ClaimRecord
from hs_assets.wire.rid import Kind, Rid
from hs_assets.wire.spool import Spool

BLOCKS, BLOCK_BYTES, ROUNDS = 2, 4096, 10
FACTS = DumpFacts("server-1", "fingerprint-1", (3, 31, 61), 4, "F32")


def main(folder: Path) -> None:
    spool = Spool(folder)
    spool.make()
    ring = Ring(torch.device("cpu"), WritingTask(0, 2, BLOCKS, BLOCK_BYTES, str(folder), 1 << 30, FACTS, FACTS))
    transfer = Transfer(torch.device("cpu"), 1 << 30, ring)
    expected = {}
    for turn in range(ROUNDS):
        states = torch.randn(500, 3, 4)  # some 73 rows fill a block: several blocks have none of ours
        ids = torch.arange(500, dtype=torch.int32)
        segments = [
            Segment(Rid(Kind.SAMPLE, "0123abcd", "demo-00000", 2 * turn + i, 30), at, 30, 0) for i, at in ((0, 5), (1, 450))
        ]
        for segment in segments:
            ClaimRecord(str(segment.rid), 0, os.getpid(), 0.0).write(spool.dump(str(segment.rid)).claim)
            expected[str(segment.rid)] = states[segment.start : segment.start + 30].numpy().tobytes()
        transfer.submit(StatesBatch(segments, ids, states, row_checksums(states)))
    transfer.drain(20)
    assert not transfer.alive, "it waits for a block that nobody hands back"
    for rid, states in expected.items():
        files = spool.dump(rid)
        assert files.commit.exists(), rid
        assert states in files.data.read_bytes(), rid
    print(f"{len(expected)} dumps are whole")


main(Path(sys.argv[1]))
