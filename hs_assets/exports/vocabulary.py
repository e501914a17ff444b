"""The draft vocabulary: which token ids of the target a drafter can say, as the mappings ``d2t`` and ``t2d``.

It is made from the supervised tokens of the stored samples, once, and changes only when it is asked for: a drafter that was
trained with one mapping is useless with another. It lies in one JSON file, and each export names its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hs_assets.errors import ExportError
from hs_assets.store import Store
from hs_assets.store.layout import replace_file
from hs_assets.store.manifest import Manifest

FILE = "vocabulary.json"
"""In a project's home."""

_FORMAT, _VERSION = "hs-assets-vocabulary", 1


@dataclass(frozen=True)
class VocabularyMapping:
    """A draft vocabulary of D of the target's V token ids.

    Attributes:
        ids: the target's ids, ascending; draft id i is ``ids[i]``.
        target_size: V.
        supervised_tokens: how many supervised tokens there were, and ``covered_tokens`` of them are in the vocabulary.
        supervised_ids: how many different ids they had; where fewer than D, the lowest other ids fill it up.
        made_from: partition → `samples_hash` of what was counted of it.
    """

    ids: tuple[int, ...]
    target_size: int
    supervised_tokens: int
    covered_tokens: int
    supervised_ids: int
    made_from: dict[str, str]

    @cached_property
    def d2t(self) -> np.ndarray:
        """int64 [D]: target id − draft id."""
        return np.array(self.ids, np.int64) - np.arange(len(self.ids))

    @cached_property
    def t2d(self) -> np.ndarray:
        """bool [V]: whether a target id is in the draft vocabulary."""
        chosen = np.zeros(self.target_size, bool)
        chosen[list(self.ids)] = True
        return chosen

    @cached_property
    def sha256(self) -> str:
        """Hash of the two mappings."""
        return hashlib.sha256(self.d2t.astype("<i8").tobytes() + self.t2d.tobytes()).hexdigest()

    def stale(self, partitions: Mapping[str, str]) -> str | None:
        """Which of these partitions (partition → `samples_hash`) were not counted, or not as they are now; None if all were."""
        changed = [key for key, now in partitions.items() if self.made_from.get(key, now) != now]
        kinds = {"new": partitions.keys() - self.made_from.keys(), "changed": changed}
        said = [f"{len(keys)} {kind} ({', '.join(sorted(keys)[:3])})" for kind, keys in kinds.items() if keys]
        return f"partitions since it was made: {', '.join(said)}" if said else None


def make_mapping(
    store: Store, manifests: Sequence[Manifest], draft_size: int, target_size: int, progress: Callable[[], None]
) -> VocabularyMapping:
    """The `draft_size` ids that are supervised most often in all samples; among equals the lower ids.

    Arguments:
        target_size: the target's vocabulary, padding included (``vocab_size`` of its config.json).
        progress: called after each partition.

    Raises:
        ExportError: the draft vocabulary is larger than the target's, there is no sample, or an id is outside.
    """
    if not 0 < draft_size <= target_size:
        raise ExportError(
            "a draft vocabulary cannot be larger than the target's",
            expected=f"1 to {target_size}",
            got=draft_size,
            remedy="choose a smaller draft vocabulary",
        )
    counts = np.zeros(target_size, np.int64)
    for manifest in manifests:
        supervised = [np.empty(0, np.int32)]
        for sample in manifest.samples:
            ids, mask = store.ids_and_mask(manifest, sample)
            if ids.min() < 0 or ids.max() >= target_size:
                raise ExportError(
                    "a token id is outside the target's vocabulary",
                    where=sample.sample_id,
                    expected=f"0 to {target_size - 1}",
                    got=f"{ids.min()} to {ids.max()}",
                    remedy="this is another model than the samples are of",
                )
            supervised.append(ids[mask])
        counts += np.bincount(np.concatenate(supervised), minlength=target_size)
        progress()
    if not counts.any():
        raise ExportError("there are no supervised tokens to make a vocabulary from", where=store.paths.root)
    most_first = np.lexsort((np.arange(target_size), -counts))[:draft_size]
    return VocabularyMapping(
        ids=tuple(sorted(most_first.tolist())),
        target_size=target_size,
        supervised_tokens=int(counts.sum()),
        covered_tokens=int(counts[most_first].sum()),
        supervised_ids=int(np.count_nonzero(counts)),
        made_from={manifest.partition: samples_hash(manifest) for manifest in manifests},
    )


def keep_mapping(path: Path, mapping: VocabularyMapping, *, replace: bool) -> bool:
    """Write a mapping to its file; returns whether the file changed.

    Raises:
        ExportError: another one is there, and it is not to be replaced.
    """
    before = find_mapping(path)
    if before == mapping:
        return False
    if before is not None and before.sha256 != mapping.sha256 and not replace:
        raise ExportError(
            "another vocabulary mapping is there already",
            where=path,
            expected=f"{mapping.sha256} ({len(mapping.ids)} of {mapping.target_size} ids)",
            got=f"{before.sha256} ({len(before.ids)} of {before.target_size} ids)",
            remedy="drafters of the old one need it: keep it, or ask for the new one with --replace (in Dagster: replace: true)",
        )
    replace_file(path, json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(mapping), "sha256": mapping.sha256}))
    return True


def find_mapping(path: Path) -> VocabularyMapping | None:
    """The mapping in a file, if there is one.

    Raises:
        ExportError: the file is damaged, or of another version.
    """
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_text())
        sha256, kind = body.pop("sha256"), f"{body.pop('format')} {body.pop('version')}"
        mapping = VocabularyMapping(**{**body, "ids": tuple(body["ids"])})
        whole = kind == f"{_FORMAT} {_VERSION}" and mapping.sha256 == sha256
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        whole, kind = False, repr(error)
    if not whole:
        raise ExportError(
            "a vocabulary mapping cannot be read", where=path, expected=f"{_FORMAT} {_VERSION}, whole", got=kind,
            remedy="remove the file, then make the mapping again",
        )  # fmt: skip
    return mapping


def samples_hash(manifest: Manifest) -> str:
    """Hash of which samples a partition has stored, of which version of its prompts."""
    samples = [manifest.prompts.version, [sample.sample_id for sample in manifest.samples]]
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()[:16]
