"""Asset `layer_set`: what is to be extracted, recorded once for all partitions. Runs extract what it recorded, or fail."""

import dataclasses

import dagster as dg

from hs_assets.defs.project import ProjectResource
from hs_assets.errors import SpecChangedError
from hs_assets.serving.launch import Target, resolve
from hs_assets.wire.layers import to_hf_index, to_layer_output, to_speculators_id

LAYER_SET = dg.AssetKey("layer_set")
_DATA_VERSION = "dagster/data_version"


@dg.asset(key=LAYER_SET, group_name="extraction", kinds={"toml"}, owners=["team:hs-assets"])
def layer_set(project: ProjectResource) -> dg.MaterializeResult[None]:
    """Which residual streams to extract, and the state spec: all that changes the numbers.

    Materialise it after changing `layers`, the model or the server's flags in the configuration. Exactly the partitions
    that were extracted before become stale then; going back makes them fresh again.
    """
    target = resolve(project.load())
    final = target.layer_set.final
    rows = [
        dg.TableRecord(
            {
                "residual id": i,
                "HF hidden_states": str(to_hf_index(i, final)),
                "speculators, vLLM": str(to_speculators_id(i)),
                "output of layer (SpecForge, ModelOpt)": str(to_layer_output(i)),
            }
        )
        for i in target.layer_set.residual_ids
    ]
    return dg.MaterializeResult(
        data_version=dg.DataVersion(data_version(target)),
        metadata={
            "layer_set": target.layer_set.id,
            "state_fingerprint": target.spec.fingerprint,
            "state_spec": dg.JsonMetadataValue(dataclasses.asdict(target.spec)),
            "layers": dg.TableMetadataValue(rows, schema=dg.TableSchema([dg.TableColumn(name) for name in rows[0].data])),
        },
    )


def data_version(target: Target) -> str:
    """The data version of a target: its state fingerprint and its layer set."""
    return f"{target.spec.fingerprint}/{target.layer_set.id}"


def require_recorded(instance: dg.DagsterInstance, target: Target) -> None:
    """Raise SpecChangedError unless the latest `layer_set` recorded just this target."""
    event = instance.get_latest_materialization_event(LAYER_SET)
    tags = event.asset_materialization.tags if event and event.asset_materialization else None
    recorded = tags.get(_DATA_VERSION) if tags else None
    if recorded != data_version(target):
        raise SpecChangedError(
            "the configuration is not what layer_set recorded",
            expected=recorded or "a materialisation of layer_set",
            got=data_version(target),
            remedy="materialise layer_set",
        )
