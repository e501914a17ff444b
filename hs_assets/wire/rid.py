"""Request ids. One names the sample, the attempt and the whole length, so that the first chunk of a prompt knows it all.

    hs.<kind>.<nonce>.<partition>.<row>.T<length>        for example hs.s.9f2c01ab.demo-00003.0017.T512

A request whose id has another form (health checks, other people's traffic) is none of our business.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from enum import StrEnum

from hs_assets.errors import WireError

MAX_PARTITION_CHARS = 150
_PARTITION = rf"[A-Za-z0-9._-]{{1,{MAX_PARTITION_CHARS}}}"
_RID = re.compile(
    rf"hs\.(?P<kind>[sc])\.(?P<nonce>[0-9a-f]{{8}})\.(?P<partition>{_PARTITION})\.(?P<row>\d{{4,9}})\.T(?P<length>\d{{1,9}})"
)


class Kind(StrEnum):
    """What a request is for."""

    SAMPLE = "s"
    CANARY = "c"


@dataclass(frozen=True, slots=True)
class Rid:
    """A request id, taken apart. ``length`` is the number of prompt tokens; ``nonce`` differs for every attempt."""

    kind: Kind
    nonce: str
    partition: str
    row: int
    length: int

    def __str__(self) -> str:
        return f"hs.{self.kind}.{self.nonce}.{self.partition}.{self.row:04d}.T{self.length}"

    @property
    def sample_id(self) -> str:
        """``<partition>/<row, 4 digits>``"""
        return sample_id(self.partition, self.row)

    def retry(self) -> Rid:
        """The same request under a new nonce."""
        return replace(self, nonce=secrets.token_hex(4))


def new_rid(partition: str, row: int, length: int, kind: Kind = Kind.SAMPLE) -> Rid:
    """A request id with a fresh nonce."""
    if not is_partition_key(partition):
        raise WireError("not a partition key", where=partition, expected=_PARTITION)
    return Rid(kind, secrets.token_hex(4), partition, row, length)


def parse_rid(text: str) -> Rid | None:
    """The request id in `text`, or None where it is not one of ours."""
    match = _RID.fullmatch(text)
    if match is None:
        return None
    rid = Rid(Kind(match["kind"]), match["nonce"], match["partition"], int(match["row"]), int(match["length"]))
    return rid if str(rid) == text else None


def sample_id(partition: str, row: int) -> str:
    """The id of a sample: its partition and its row in it."""
    return f"{partition}/{row:04d}"


def is_partition_key(text: str) -> bool:
    """Whether `text` can be a partition key, and so a folder name."""
    return re.fullmatch(_PARTITION, text) is not None and text not in {".", ".."}
