"""The spool: a folder in ``/dev/shm`` with the dumps, and the records of server and clients beside them.

    <spool>/capture.json                      what the plugin shall do (`CaptureConfig`)
    <spool>/by-hand.lock                      locked by the script that started a server by hand, and by that server
    <spool>/ready/rendezvous                  where the ranks find each other (torch's FileStore)
    <spool>/ready/rank-<r>.json               each rank's `ReadyRecord`, or
    <spool>/ready/refused-<r>.json            its `RefusedRecord`
    <spool>/ready/counters-<r>.json           each rank's `CountersRecord`, every second
    <spool>/ready/room                        what the writer processes count of the spool's bytes
    <spool>/dumps/<rid>.safetensors           a dump; whole once its commit record is there
    <spool>/dumps/<rid>.commit.json           the server's `CommitRecord`, or
    <spool>/dumps/<rid>.failure.json          its `FailureRecord`
    <spool>/dumps/<rid>.claim.json            the client's `ClaimRecord`, before the request
    <spool>/dumps/<rid>.answer.json           the client's `AnswerRecord`, after it
    <spool>/canary/rank-<r>/<rid>.…           the canary's dumps, from every rank
    <spool>/canary/rank-<r>/<rid>.probe.…     the same states seen by an independent hook

Folders have mode 0700, files 0600.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hs_assets.errors import SpoolError

_MODE = 0o700
_OTHERS = 0o077
CLAIM, ANSWER, COMMIT, FAILURE, DATA = ".claim.json", ".answer.json", ".commit.json", ".failure.json", ".safetensors"
_SUFFIXES = (CLAIM, ANSWER, COMMIT, FAILURE, DATA)


@dataclass(frozen=True, slots=True)
class DumpFiles:
    """The files that belong to one request, in the folder of dumps or of a canary rank."""

    folder: Path
    rid: str

    @property
    def data(self) -> Path:
        return self.folder / f"{self.rid}{DATA}"

    @property
    def commit(self) -> Path:
        return self.folder / f"{self.rid}{COMMIT}"

    @property
    def failure(self) -> Path:
        return self.folder / f"{self.rid}{FAILURE}"

    @property
    def claim(self) -> Path:
        return self.folder / f"{self.rid}{CLAIM}"

    @property
    def answer(self) -> Path:
        return self.folder / f"{self.rid}{ANSWER}"

    @property
    def whole(self) -> bool:
        """Whether the dump is committed, and its answer kept: whoever owns it can validate it."""
        return self.commit.exists() and self.answer.exists() and self.claim.exists()

    def free(self) -> None:
        """Remove them all; the claim goes last, because its bytes are counted as long as it is there."""
        for path in (self.commit, self.failure, self.answer, self.data, self.claim):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Spool:
    """Paths inside a spool."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "capture.json"

    @property
    def by_hand_lock(self) -> Path:
        return self.root / "by-hand.lock"

    @property
    def ready(self) -> Path:
        return self.root / "ready"

    @property
    def dumps(self) -> Path:
        return self.root / "dumps"

    @property
    def canary(self) -> Path:
        return self.root / "canary"

    @property
    def rendezvous(self) -> Path:
        return self.ready / "rendezvous"

    @property
    def room(self) -> Path:
        return self.ready / "room"

    def ready_record(self, rank: int) -> Path:
        return self.ready / f"rank-{rank}.json"

    def refused_record(self, rank: int) -> Path:
        return self.ready / f"refused-{rank}.json"

    def counters(self, rank: int) -> Path:
        return self.ready / f"counters-{rank}.json"

    def dump(self, rid: str) -> DumpFiles:
        return DumpFiles(self.dumps, rid)

    def canary_dump(self, rank: int, rid: str) -> DumpFiles:
        return DumpFiles(self.canary / f"rank-{rank}", rid)

    def make(self) -> None:
        """Make the folders that are missing, mode 0700.

        Raises:
            SpoolError: one is there and not ours alone: `/dev/shm` is open to every user of the machine.
        """
        for folder in (self.root, self.ready, self.dumps, self.canary):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
                raise SpoolError(
                    "a folder of the spool is not ours alone",
                    where=folder,
                    expected=f"a folder of user {os.geteuid()} with mode {_MODE:o}",
                    got=f"{stat.filemode(found.st_mode)} of user {found.st_uid}",
                    remedy="remove it, or set server.spool_root to a folder of your own",
                )

    def listing(self) -> dict[str, set[str]]:
        """Request id → which of its files lie among the dumps, by their suffix."""
        found: dict[str, set[str]] = {}
        for name in os.listdir(self.dumps):  # noqa: PTH208  # every claim looks; iterdir() would make a Path of each
            suffix = next((s for s in _SUFFIXES if name.endswith(s)), None)
            if suffix is not None:
                found.setdefault(name.removesuffix(suffix), set()).add(suffix)
        return found

    def data_stats(self) -> Iterator[os.stat_result]:
        """What the file system says of each data file among the dumps; those removed meanwhile are left out."""
        with suppress(FileNotFoundError), os.scandir(self.dumps) as entries:
            for entry in entries:
                if entry.name.endswith(DATA):
                    with suppress(FileNotFoundError):
                        yield entry.stat()

    def rids(self) -> list[str]:
        """The request ids that have any file among the dumps."""
        return list(self.listing())
