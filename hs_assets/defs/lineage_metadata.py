"""What the UI shows of where a partition's samples came from: counts, the first rows, and the command that gives them all."""

import shlex
from collections import Counter
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import dagster as dg

from hs_assets.config import Project
from hs_assets.store.layout import StorePaths
from hs_assets.store.lineage import LineageRow, lineage_of
from hs_assets.store.manifest import Manifest

_FIRST_ROWS = 10
_COLUMNS = {"sample": "string", "outcome": "string", "source row": "int", "sha256 of the row": "string", "tokens": "int"}
_COLUMNS |= {"sha256 of the tokens": "string", "runs": "string", "servers": "string", "captured (UTC)": "string"}


def lineage_metadata(manifest: Manifest, project: Project) -> dict[str, dg.MetadataValue]:
    """Sample → source row, prompt partition, run, state spec and server."""
    words = ["hs-assets", "lineage", "--home", str(project.home.root), "--config", project.origin]
    words += ["--layer-set", manifest.layer_set, "--partition", manifest.partition]
    command = shlex.join([*words, "--parquet", f"{manifest.partition}.parquet"])
    path = StorePaths(project.store_path).manifest(manifest.layer_set, manifest.partition)
    columns = [dg.TableColumn(name, kind) for name, kind in _COLUMNS.items()]
    records = [_record(row) for row in islice(lineage_of(manifest), _FIRST_ROWS)]
    return {
        "lineage": dg.JsonMetadataValue(_counts(manifest)),
        "lineage of the first rows": dg.TableMetadataValue(records, schema=dg.TableSchema(columns)),
        "lineage of all rows": dg.MarkdownMetadataValue(f"`{command}`"),
        "manifest": dg.PathMetadataValue(path),
    }


def _counts(manifest: Manifest) -> dict[str, Any]:
    """What all samples have in common, and how many have what not all of them may have."""
    samples, prompts = manifest.samples, manifest.prompts
    return {
        "source": {"name": prompts.source_name, "path": prompts.source_path},
        "prompts": {"partition": manifest.partition, "version": prompts.version},
        "sha256": {"template": prompts.template_sha256, "tokenizer": prompts.tokenizer_sha256},
        "state_fingerprint": manifest.state_fingerprint,
        "state_spec": manifest.state_spec,
        "samples_by_run": dict(Counter(run for one in samples for run in {part.run_id for part in one.parts})),
        "samples_by_server": dict(Counter(server for one in samples for server in {part.server for part in one.parts})),
        "samples_by_generation": dict(Counter(name for one in samples for name in {part.generation for part in one.parts})),
    }


def _record(row: LineageRow) -> dg.TableRecord:
    return dg.TableRecord(
        {
            "sample": row.sample_id,
            "outcome": row.outcome if row.reason is None else f"{row.outcome}: {row.reason}",
            "source row": row.source_row,
            "sha256 of the row": row.source_sha256,
            "tokens": row.tokens or 0,
            "sha256 of the tokens": row.token_sha256 or "",
            "runs": ", ".join(dict.fromkeys(row.run_ids)),
            "servers": ", ".join(dict.fromkeys(row.servers)),
            "captured (UTC)": ", ".join(dict.fromkeys(_utc(seconds) for seconds in row.captured_at)),
        }
    )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
