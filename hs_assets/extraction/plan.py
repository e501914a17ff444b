"""What of a partition is stored already, in whatever layer set, and what the server must be asked for.

A state is known by (state fingerprint, token hash, residual id): a subset of a stored layer set, changed masks and
changed templates that give the same tokens cost no request.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_assets.config import Project
from hs_assets.errors import ExtractionError, PromptError
from hs_assets.extraction.status import source_of
from hs_assets.samples.filters import limits_of
from hs_assets.samples.prepare import prompt_options
from hs_assets.samples.prompts import Prompt, PromptPartition, read_partition_table
from hs_assets.samples.responses import read_responses
from hs_assets.samples.tokenizer import changed_since
from hs_assets.serving.launch import Target
from hs_assets.store.generation import state_arrays
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Manifest, Part, UnstoredRow, manifests_of
from hs_assets.wire.dump import ITEM_BYTES, DumpLayout
from hs_assets.wire.layers import LayerSet

_REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Plan:
    """A partition's prompts and the states that are stored of them.

    ``layout``: of a dump of one token. ``known``: row → residual id → the part that holds its states. ``before``: what the
    last manifest of this layer set said of rows without states, by sample id. ``other_spec``: what the partition is stored
    under, where that is not the state spec that is asked for.
    """

    prompts: PromptPartition
    layer_set: LayerSet
    layout: DumpLayout
    known: dict[int, dict[int, Part]]
    before: dict[str, UnstoredRow]
    other_spec: dict[str, Any] | None = None

    def missing(self, row: int) -> tuple[int, ...]:
        """Residual ids of a row that are not stored."""
        return tuple(i for i in self.layer_set.residual_ids if i not in self.known[row])

    @property
    def to_capture(self) -> list[Prompt]:
        """The prompts that need the server: some state of them is not stored, and they were not rejected."""
        rejected = {row.sample_id for row in self.before.values() if is_rejected(row)}
        skipped = {row.row for row in self.prompts.rows if row.sample_id in rejected}
        return [prompt for prompt in self.prompts.prompts if prompt.row not in skipped and self.missing(prompt.row)]

    @property
    def store_bytes(self) -> int:
        """Bytes that storing what is missing takes."""
        width = self.layout.hidden_size * ITEM_BYTES[self.layout.dtype]
        return sum(len(prompt.input_ids) * len(self.missing(prompt.row)) * width for prompt in self.to_capture)

    def dump_bytes(self, prompt: Prompt) -> int:
        """Bytes that the dump of a prompt takes in the spool."""
        return dataclasses.replace(self.layout, tokens=len(prompt.input_ids)).file_bytes

    def parts(self, row: int) -> tuple[Part, ...]:
        """The parts that hold a stored row's states, each naming the residual ids it is used for."""
        used: dict[Part, list[int]] = {}
        for residual_id in self.layer_set.residual_ids:
            used.setdefault(self.known[row][residual_id], []).append(residual_id)
        return tuple(_only(part, tuple(ids)) for part, ids in used.items())


def _only(part: Part, residual_ids: tuple[int, ...]) -> Part:
    norms = dict(zip(part.residual_ids, part.norms, strict=True))
    return dataclasses.replace(part, residual_ids=residual_ids, norms=tuple(norms[i] for i in residual_ids))


def make_plan(project: Project, target: Target, paths: StorePaths, key: str) -> Plan:
    """What `compare` finds, if there is room for it.

    Raises:
        PromptError: its prompts were never made, or not as the configuration and the checkpoint are now.
        ExtractionError: more of its rows are dropped than may be, or what is missing does not fit on the store's disk.
    """
    plan = compare(project, target, paths, key)
    _require_current(project, target, plan.prompts)
    prompts, limit = plan.prompts, project.settings.prompts.max_dropped_share
    dropped = sum(prompts.dropped.values())
    if dropped > limit * len(prompts.rows):
        raise ExtractionError(
            "the prompts of this partition failed: too many rows are dropped",
            where=key,
            expected=f"at most a share of {limit} (prompts.max_dropped_share)",
            got=f"{dropped} of {len(prompts.rows)} rows: {prompts.dropped}",
            remedy="mend the source and materialise prompts again, or raise the share",
        )
    if plan.store_bytes > (free := free_bytes(paths.root)):
        raise ExtractionError(
            "the store's disk cannot hold this partition",
            where=f"{key} in {paths.root}",
            expected=f"{plan.store_bytes:,} bytes for {len(plan.to_capture)} samples",
            got=f"{free:,} bytes free",
            remedy="free some room, or set store.path",
        )
    return plan


def _require_current(project: Project, target: Target, made: PromptPartition) -> None:
    """Raise PromptError unless prompts were made with the settings, answers, template and tokenizer that are asked for now."""
    settings = project.settings
    responses = read_responses(project.home.responses, made.key) if settings.responses.enabled else None
    options = prompt_options(source_of(project, made.key), limits_of(settings.prompts, target.facts), responses)
    if made.options != options:
        raise PromptError(
            "the prompts were made with other settings",
            where=made.key,
            expected=f"options {options}, as [prompts] and [responses] are now",
            got=made.options or "a table of an earlier version",
            remedy="materialise prompts; states of the same tokens are not asked for again",
        )
    path, trusted = settings.model.path, settings.model.trust_remote_code
    if changed := changed_since(path, made.tokenizer_sha256, made.template_sha256, trust_remote_code=trusted):
        raise PromptError(
            f"the model's {changed} changed since the prompts were made",
            where=made.key,
            expected=f"the {changed} that is in {path} now",
            got=f"prompts of tokenizer {made.tokenizer_sha256[:12]} and template {made.template_sha256[:12]}",
            remedy="materialise prompts of all partitions; states of the same tokens are not asked for again",
        )


def compare(project: Project, target: Target, paths: StorePaths, key: str) -> Plan:
    """Compare the partition's prompts with what all its manifests say is stored.

    Raises:
        PromptError: its prompts were never made.
    """
    prompts = read_partition_table(project.home.prompts, key)
    stored = manifests_of(paths, key)
    manifests = [manifest for manifest in stored if manifest.state_fingerprint == target.spec.fingerprint]
    states = _states(paths.generations(target.spec.fingerprint, key), manifests)
    return Plan(
        prompts=prompts,
        layer_set=target.layer_set,
        layout=target.layout,
        known={prompt.row: dict(states.get(prompt.token_sha256, {})) for prompt in prompts.prompts},
        before=_before(manifests, target.layer_set, prompts),
        other_spec=stored[-1].state_spec if stored and not manifests else None,
    )


def free_bytes(root: Path) -> int:
    """Bytes free on the disk of a store, made or not."""
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free


def is_rejected(row: UnstoredRow) -> bool:
    """Whether a row is not tried again, because it failed the same rule twice."""
    return row.outcome == "dropped" and row.reason.startswith(f"{_REJECTED}(")


def rejected(rule: str) -> str:
    """The ledger's reason for a row that failed `rule` twice."""
    return f"{_REJECTED}({rule})"


def _before(manifests: list[Manifest], layer_set: LayerSet, prompts: PromptPartition) -> dict[str, UnstoredRow]:
    """Rows without states in the last manifest, as far as they are still the same rows of the same prompts."""
    mine = next((m for m in manifests if m.layer_set == layer_set.id and m.prompts.version == prompts.version), None)
    return {row.sample_id: row for row in mine.unstored} if mine else {}


def _states(generations: Path, manifests: list[Manifest]) -> dict[str, dict[int, Part]]:
    """Token hash → residual id → the part that holds its states; what a manifest names and the disk lacks is not stored."""
    freed = {folder.name: _freed(folder) for folder in generations.glob("*")}
    states: dict[str, dict[int, Part]] = {}
    for manifest in manifests:
        for sample in manifest.samples:
            here = states.setdefault(sample.token_sha256, {})
            for part in sample.parts:
                if part.generation in freed:
                    here |= {i: part for i in part.residual_ids if i not in here and i not in freed[part.generation]}
    return states


def _freed(generation: Path) -> Set[int]:
    """Residual ids that were freed of a generation; none where its metadata are damaged, which is not for a plan to say."""
    with suppress(OSError, KeyError, ValueError, TypeError):
        return state_arrays(generation).freed.keys()
    return frozenset()
