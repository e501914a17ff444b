"""Assets for trainers: stored samples as the files of SpecForge, speculators and ModelOpt, and the draft vocabulary.

They are made when somebody asks for them, from what is in the store; no server is needed. They lie under
``<home>/exports/<trainer>/<layer set>-<state fingerprint>/``, which is what the trainer is pointed to.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg

from hs_assets.config import Project
from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import SAMPLES
from hs_assets.exports.export import Exported, check_room, choose_manifests, export_partition
from hs_assets.exports.folder import ALL, ExportFolder
from hs_assets.exports.summary import begin, combine, finish
from hs_assets.exports.trainer import Trainer
from hs_assets.exports.trainers import SPECULATORS, TRAINERS
from hs_assets.exports.vocabulary import FILE, find_mapping, keep_mapping, make_mapping
from hs_assets.extraction.progress import Progress
from hs_assets.samples.model import read_model_facts
from hs_assets.store import open_store
from hs_assets.store.manifest import Manifest
from hs_assets.wire.layers import LayerSet

VOCABULARY = dg.AssetKey("vocabulary_mapping")
_GROUP, _OWNERS = "exports", ["team:hs-assets"]


class VocabularyConfig(dg.Config):
    """How large the draft vocabulary is to be, and whether it may take the place of another."""

    draft_size: int = 32_000
    replace: bool = False


@dg.asset(key=VOCABULARY, deps=[SAMPLES], group_name=_GROUP, kinds={"json"}, owners=_OWNERS)
def vocabulary_mapping(
    context: dg.AssetExecutionContext, config: VocabularyConfig, project: ProjectResource
) -> dg.MaterializeResult[None]:
    """Which token ids a drafter can say: the most frequent supervised ones of all stored samples, as `d2t` and `t2d`.

    Samples that came later make it stale, and exports say so. A drafter that was trained with one mapping is useless with
    another: where another is there already this fails, unless `replace: true` is given; its hash stays in the asset's history.
    """
    loaded = project.load()
    store, path = open_store(loaded.store_path), loaded.home.root / FILE
    target_size = read_model_facts(loaded.settings.model.path).vocab_size
    manifests = choose_manifests(store, _layer_set(loaded))
    mapping, before = make_mapping(store, manifests, config.draft_size, target_size, lambda: None), find_mapping(path)
    keep_mapping(path, mapping, replace=config.replace)
    if before is not None and before.sha256 != mapping.sha256:
        context.log.warning("the mapping %s is replaced by %s", before.sha256, mapping.sha256)
    return dg.MaterializeResult(
        data_version=dg.DataVersion(mapping.sha256),
        metadata={
            "sha256": mapping.sha256,
            "replaced": before.sha256 if before is not None and before.sha256 != mapping.sha256 else "nothing",
            "draft size": len(mapping.ids),
            "target size": target_size,
            "supervised tokens": mapping.supervised_tokens,
            "supervised ids": mapping.supervised_ids,
            "covered share": round(mapping.covered_tokens / mapping.supervised_tokens, 6),
            "partitions": len(mapping.made_from),
            "path": dg.MetadataValue.path(path),
        },
    )


def build_exports(partitions: dg.PartitionsDefinition[str]) -> list[dg.AssetsDefinition]:
    """The vocabulary, an export for each trainer over the partitions of all sources, and speculators' dataset of them all."""
    return [vocabulary_mapping, *(_build_export(trainer, partitions) for trainer in TRAINERS.values()), speculators_dataset]


def export_key(trainer: Trainer) -> dg.AssetKey:
    """The asset of a trainer's export, such as ``specforge_export``."""
    return dg.AssetKey(f"{trainer.name.replace('-', '_')}_export")


def _build_export(trainer: Trainer, partitions: dg.PartitionsDefinition[str]) -> dg.AssetsDefinition:
    norm = "after" if trainer.post_norm else "before"

    @dg.asset(
        key=export_key(trainer),
        deps=[SAMPLES, VOCABULARY],
        partitions_def=partitions,
        group_name=_GROUP,
        kinds={"arrow" if trainer is SPECULATORS else "pytorch"},
        owners=_OWNERS,
        description=f"""The stored samples of a partition as files that {trainer.loader} reads, the final state {norm} the norm.

Materialised again it leaves alone what is identical, byte for byte, and replaces what is not. The loss mask is that
{trainer.loss_mask}.""",
    )
    def export(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult[None]:
        loaded = project.load()
        store, layer_set = open_store(loaded.store_path), _layer_set(loaded)
        (manifest,) = choose_manifests(store, layer_set, [context.partition_key])
        folder, mapping = _folder(loaded, trainer, manifest), find_mapping(loaded.home.root / FILE)
        begin(folder, manifest, trainer)
        check_room(store, [manifest], folder)
        exported = export_partition(store, manifest, trainer, folder, _teller(len(manifest.samples), context.log.info))
        body = finish(folder, trainer, manifest, [exported], mapping)
        stale = body["vocabulary"] and body["vocabulary"]["stale"]
        if stale:
            context.log.warning("the vocabulary mapping is stale: %s", stale)
        version = f"{exported.source_sha256[:16]}/{mapping.sha256[:16] if mapping else 'no vocabulary'}"
        return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=_metadata(exported, folder, body, trainer))

    return export


@dg.asset(deps=[export_key(SPECULATORS)], group_name=_GROUP, kinds={"arrow"}, owners=_OWNERS)
def speculators_dataset(project: ProjectResource) -> dg.MaterializeResult[None]:
    """One dataset for speculators over all exported partitions (`--data-path …/all`), their states linked."""
    loaded = project.load()
    manifests = choose_manifests(open_store(loaded.store_path), _layer_set(loaded))
    folder = _folder(loaded, SPECULATORS, manifests[0])
    return dg.MaterializeResult(metadata={"rows": combine(folder), "path": dg.MetadataValue.path(folder.root / ALL)})


def _teller(samples: int, say: Callable[[str], None]) -> Callable[[str, int], None]:
    """What is called with each sample that is exported, and its tokens."""
    progress, done, exported = Progress(samples, "samples", say), 0, 0

    def tell(_sample_id: str, tokens: int) -> None:
        nonlocal done, exported
        done, exported = done + 1, exported + tokens
        progress.tell(done, exported)

    return tell


def _layer_set(project: Project) -> str:
    return LayerSet.choose(project.settings.layers, read_model_facts(project.settings.model.path).num_layers).id


def _folder(project: Project, trainer: Trainer, manifest: Manifest) -> ExportFolder:
    root: Path = project.home.root / "exports" / trainer.name / f"{manifest.layer_set}-{manifest.state_fingerprint}"
    return ExportFolder(root)


def _metadata(exported: Exported, folder: ExportFolder, body: dict[str, Any], trainer: Trainer) -> dict[str, dg.MetadataValue]:
    return {
        "state": dg.TextMetadataValue(exported.state),
        "why": dg.TextMetadataValue(exported.why),
        "samples": dg.IntMetadataValue(exported.samples),
        "tokens": dg.IntMetadataValue(exported.tokens),
        "trained positions": dg.IntMetadataValue(exported.trained_positions),
        "bytes": dg.IntMetadataValue(exported.bytes),
        "path": dg.MetadataValue.path(folder.partition(exported.partition)),
        "manifest sha256": dg.TextMetadataValue(exported.manifest_sha256),
        "vocabulary mapping": dg.JsonMetadataValue(body["vocabulary"]),
        "loader": dg.TextMetadataValue(trainer.loader),
        "loss mask": dg.TextMetadataValue(trainer.loss_mask),
    }
