"""Asset `layer_set`: what is to be extracted, recorded once for all partitions. Runs extract what it recorded, or fail."""

import dataclasses

import dagster as dg

from hs_assets.defs.project import ProjectResource
from hs_assets.defs.recorded import mark_spec_current, spec_marks, stored_versions
from hs_assets.errors import SpecChangedError
from hs_assets.serving.launch import Target, resolve
from hs_assets.serving.spec import Difference, spec_differences
from hs_assets.wire.layers import to_hf_index, to_layer_output, to_speculators_id

LAYER_SET, RECORD_JOB = dg.AssetKey("layer_set"), "record_layer_set"
_DATA_VERSION = "dagster/data_version"
_LAYERS, _SPEC = "layer_set", "state_spec"

STALE = "stale partitions"
"""Metadata: how many partitions are stored as something else than is recorded now; an asset's page tells of one at a time."""


@dg.asset(key=LAYER_SET, group_name="extraction", kinds={"toml"}, owners=["team:hs-assets"])
def layer_set(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult[None]:
    """Which residual streams to extract, and the state spec: all that changes the numbers.

    Materialise it after changing `layers`, the model or the server's flags in the configuration. Exactly the partitions
    that were extracted before become stale then; going back makes them fresh again. The schedule `reextract_stale` records a
    change by itself, and extracts again what another layer set made stale.
    """
    target = resolve(project.load())
    marks = spec_marks(context.instance, target.spec.fingerprint)
    mark_spec_current(context.instance, target.spec.fingerprint, context.run, marks)
    metadata = _metadata(context.instance, target)
    context.log.info("%s partitions are stale; the check spec_current changed on %d", metadata[STALE].value, len(marks))
    return dg.MaterializeResult(data_version=dg.DataVersion(data_version(target)), metadata=metadata)


def record(instance: dg.DagsterInstance, target: Target) -> bool:
    """Record a target without a run, unless it is what is recorded; returns whether it was not."""
    if recorded(instance) == data_version(target):
        return False
    instance.report_runless_asset_event(
        dg.AssetMaterialization(LAYER_SET, metadata=_metadata(instance, target), tags={_DATA_VERSION: data_version(target)})
    )
    return True


def recorded(instance: dg.DagsterInstance) -> str | None:
    """The data version that the latest `layer_set` recorded."""
    event = instance.get_latest_materialization_event(LAYER_SET)
    tags = event.asset_materialization.tags if event and event.asset_materialization else None
    return tags.get(_DATA_VERSION) if tags else None


def data_version(target: Target) -> str:
    """The data version of a target: its state fingerprint and its layer set."""
    return f"{target.spec.fingerprint}/{target.layer_set.id}"


def require_recorded(instance: dg.DagsterInstance, target: Target) -> None:
    """Raise SpecChangedError, with what differs, unless the latest `layer_set` recorded just this target."""
    version = recorded(instance)
    if version == data_version(target):
        return
    expected, got = version or "a materialisation of layer_set", data_version(target)
    if differences := _differences(instance, target):
        expected = "; ".join(f"{one.name}: {one.expected}" for one in differences)
        got = "; ".join(f"{one.name}: {one.got}" for one in differences)
    raise SpecChangedError(
        "the configuration is not what layer_set recorded",
        where=", ".join(one.name for one in differences) or None,
        expected=expected,
        got=got,
        remedy="materialise layer_set, or set the configuration back",
    )


def _differences(instance: dg.DagsterInstance, target: Target) -> list[Difference]:
    """In what a target differs from the one that was recorded, as far as its materialisation says what that was."""
    event = instance.get_latest_materialization_event(LAYER_SET)
    metadata = event.asset_materialization.metadata if event and event.asset_materialization else {}
    spec, layers = metadata.get(_SPEC), metadata.get(_LAYERS)
    found = []
    if isinstance(layers, dg.TextMetadataValue) and layers.text != target.layer_set.id:
        found.append(Difference("layer set", str(layers.text), target.layer_set.id))
    if isinstance(spec, dg.JsonMetadataValue) and isinstance(spec.data, dict):
        found += spec_differences(spec.data, target.spec)
    return found


def _metadata(instance: dg.DagsterInstance, target: Target) -> dict[str, dg.MetadataValue]:
    versions = stored_versions(instance).values()
    final = target.layer_set.final
    rows = [
        dg.TableRecord(
            {
                "residual id": i,
                "HF hidden_states": str(to_hf_index(i, final)),
                "speculators, vLLM": str(to_speculators_id(i)),
                "SpecForge, ModelOpt": str(to_layer_output(i)),
            }
        )
        for i in target.layer_set.residual_ids
    ]
    return {
        _LAYERS: dg.TextMetadataValue(target.layer_set.id),
        "layers": dg.TableMetadataValue(rows, schema=dg.TableSchema([dg.TableColumn(name) for name in rows[0].data])),
        "stored partitions": dg.IntMetadataValue(len(versions)),
        STALE: dg.IntMetadataValue(sum(version.target != data_version(target) for version in versions)),
        "state_fingerprint": dg.TextMetadataValue(target.spec.fingerprint),
        _SPEC: dg.JsonMetadataValue(dataclasses.asdict(target.spec)),
    }
