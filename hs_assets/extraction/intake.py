"""Dumps in, samples out: each is validated and appended as it comes, and freed once the generation that holds it is published.

A dump outlives a crash in the spool, so what was captured before it is not asked for again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hs_assets.errors import WireError
from hs_assets.extraction.plan import Plan, is_rejected, rejected
from hs_assets.samples.conversations import Dropped
from hs_assets.samples.eagle3 import CapturedSample, load_sample
from hs_assets.samples.prompts import Prompt
from hs_assets.samples.rules import RULES, Validator
from hs_assets.serving.client import Captured, Failed
from hs_assets.store.compression import measure_compression
from hs_assets.store.layout import StorePaths
from hs_assets.store.manifest import Manifest, Part, PromptsVersion, StoredSample, UnstoredRow
from hs_assets.store.masks import write_masks
from hs_assets.store.writer import ArrayShape, GenerationWriter
from hs_assets.wire.spool import DumpFiles

_RULE_NAMES = frozenset({*(rule.__name__ for rule in RULES), "shared_prefix"})
_NORM_ROWS = 64
NOT_EXTRACTED, SERVER_DIED = "not_extracted", "server_died"
"""Why a sample has no states that no rule has seen this time."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run's samples go, and what their lineage says of it."""

    paths: StorePaths
    fingerprint: str
    spec: dict[str, object]
    run_id: str
    shape: ArrayShape


@dataclass(slots=True)
class Intake:
    """Takes the outcomes of a partition's captures, and keeps its manifest true after every publication."""

    plan: Plan
    destination: Destination
    validator: Validator
    say: Callable[[str], None]
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    generations: list[str] = field(default_factory=list)
    stored_bytes: int = 0
    manifest_changed: bool = False
    _writers: dict[tuple[int, ...], GenerationWriter] = field(default_factory=dict)
    _changing: bool = False
    """A generation is being changed; stays after an error in the midst of it, and then it is not published."""
    _unpublished: list[tuple[Prompt, DumpFiles, tuple[int, ...], Part]] = field(default_factory=list)

    def take(self, outcome: Captured | Failed) -> None:
        """Validate and append a dump, or note why there is none."""
        if isinstance(outcome, Failed):
            self._fail(outcome.prompt, outcome.reason, outcome.detail)
            return
        try:
            sample = load_sample(outcome.prompt, outcome.files)
        except WireError as error:
            self._fail(outcome.prompt, "dump_damaged", str(error))
            outcome.files.free()
            return
        violation = self.validator.check(sample)
        if violation is not None:
            self._fail(outcome.prompt, violation.rule, violation.detail)
            outcome.files.free()
            return
        self._changing = True
        self._append(sample, outcome.files)
        self._changing = False

    @property
    def unpublished_bytes(self) -> int:
        """Bytes of states that were appended and wait, their dumps in the spool, for their generation."""
        return sum(writer.bytes for writer in self._writers.values())

    def publish(self) -> None:
        """Publish what was appended, replace the manifest, and only then free the dumps."""
        self._changing = True
        for residual_ids, writer in self._writers.items():
            name = writer.publish()
            self.generations.append(name)
            self.stored_bytes += writer.bytes
            self.say(f"published {writer.samples} samples, {writer.bytes:,} bytes, as generation {name}")
            for prompt, _, ids, part in self._unpublished:
                if ids == residual_ids:
                    published = dataclasses.replace(part, generation=name)
                    self.plan.known[prompt.row] |= dict.fromkeys(ids, published)
        self._writers.clear()
        self._changing = False
        self.write_manifest()
        for _, files, _, _ in self._unpublished:
            files.free()
        self._unpublished.clear()

    def finish(self) -> None:
        """Publish what is left, also after an error of somebody else; what cannot be published is removed, its dumps stay."""
        try:
            if self._writers and not self._changing:
                self.publish()
        finally:
            for writer in self._writers.values():
                writer.discard()
            self._writers.clear()

    def write_manifest(self) -> Manifest:
        """Replace the partition's manifest by what is known now."""
        prompts, destination = self.plan.prompts, self.destination
        write_masks(destination.paths, prompts.key, prompts.version, [prompt.loss_mask for prompt in prompts.prompts])
        samples, unstored = [], []
        mask = 0
        for row in prompts.rows:
            if isinstance(row.content, Dropped):
                unstored.append(
                    UnstoredRow(
                        row.sample_id, row.source_row, row.source_sha256, "dropped", row.content.reason, row.content.detail, 0
                    )
                )
                continue
            prompt, place = row.content, mask
            mask += 1
            if self.plan.missing(prompt.row):
                unstored.append(self._unstored(row.sample_id, row.source_row, row.source_sha256, prompt))
                continue
            samples.append(
                StoredSample(
                    sample_id=row.sample_id,
                    source_row=row.source_row,
                    source_sha256=row.source_sha256,
                    tokens=len(prompt.input_ids),
                    supervised_tokens=int(prompt.loss_mask.sum()),
                    token_sha256=prompt.token_sha256,
                    mask=place,
                    parts=self.plan.parts(prompt.row),
                )
            )
        manifest = Manifest(
            partition=prompts.key,
            layer_set=self.plan.layer_set.id,
            state_fingerprint=destination.fingerprint,
            state_spec=destination.spec,
            prompts=PromptsVersion(
                prompts.version, prompts.source.name, str(prompts.source.path), prompts.template_sha256, prompts.tokenizer_sha256
            ),
            rows=len(prompts.rows),
            samples=tuple(samples),
            unstored=tuple(unstored),
            compression=measure_compression(destination.paths, destination.fingerprint, prompts.key, samples),
        )
        self.manifest_changed |= manifest.write(destination.paths)
        return manifest

    def _append(self, sample: CapturedSample, files: DumpFiles) -> None:
        ids = self.plan.missing(sample.prompt.row)
        writer = self._writers.get(ids)
        if writer is None:
            destination = self.destination
            writer = GenerationWriter(
                destination.paths,
                destination.fingerprint,
                self.plan.prompts.key,
                ids,
                self.plan.layer_set.final,
                destination.shape,
            )
            self._writers[ids] = writer
        states = {residual_id: sample.residual(residual_id) for residual_id in ids}
        offset = writer.append(sample.token_ids, states)
        commit = sample.commit
        norms = tuple(_mean_norm(rows) for rows in states.values())
        part = Part(
            "", offset, ids, norms, commit.row_checksums_crc32, commit.server, self.destination.run_id, commit.committed_at
        )
        self._unpublished.append((sample.prompt, files, ids, part))

    def _fail(self, prompt: Prompt, reason: str, detail: str) -> None:
        self.failed[prompt.row] = reason, detail
        self.say(f"{self.plan.prompts.key}/{prompt.row:04d} failed: {reason}: {detail}")

    def _unstored(self, sample_id: str, source_row: int, source_sha256: str, prompt: Prompt) -> UnstoredRow:
        """The entry of a row that has a prompt and no states."""
        before = self.plan.before.get(sample_id)
        if before is not None and is_rejected(before):
            return before
        reason, detail = self.failed.get(prompt.row, (NOT_EXTRACTED, "it was not reached"))
        if reason in (NOT_EXTRACTED, SERVER_DIED) and before is not None and before.reason in _RULE_NAMES:
            return before  # else a rule that fails at every try would never have failed twice
        if reason not in _RULE_NAMES:
            return UnstoredRow(sample_id, source_row, source_sha256, "failed", reason, detail, 1)
        if before is not None and before.reason == reason:
            return UnstoredRow(sample_id, source_row, source_sha256, "dropped", rejected(reason), detail, before.attempts + 1)
        return UnstoredRow(sample_id, source_row, source_sha256, "failed", reason, detail, 1)


def _mean_norm(states: np.ndarray) -> float:
    """Mean length of some of the states [L, H]."""
    rows = states[:: max(1, len(states) // _NORM_ROWS)].astype(np.float32)
    return round(float(np.linalg.norm(rows, axis=1).mean()), 4)
