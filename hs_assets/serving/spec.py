"""The state spec: everything that changes the numbers of a state, and its fingerprint.

Not in it: the layer set, the chat template, the tokenizer, and server flags about memory, ports and logs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hs_assets.config import Project
from hs_assets.errors import ConfigError, ServerStartError
from hs_assets.samples.model import ModelFacts, shard_files
from hs_assets.wire.dump import read_safetensors_header
from hs_assets.wire.records import CAPTURE_VERSION

_NOT_NUMERIC = frozenset(
    {
        "--base-gpu-id",
        "--context-length",
        "--host",
        "--log-level",
        "--log-level-http",
        "--log-requests",
        "--max-prefill-tokens",
        "--max-queued-requests",
        "--max-running-requests",
        "--max-total-tokens",
        "--mem-fraction-static",
        "--port",
        "--served-model-name",
        "--skip-server-warmup",
        "--sleep-on-idle",
        "--watchdog-timeout",
    }
)
"""Flags that change no state. All others are part of the spec, known or not."""

_SAMPLES_A_SHARD = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a state's numbers depend on. ``model_path`` is for people: the fingerprint goes by the weights."""

    model_path: str
    revision: str
    weight_fingerprint: str
    model_class: str
    dtype: str
    sglang_version: str
    capture_version: int
    device: str
    flags: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """16 hex digits."""
        fields = {**dataclasses.asdict(self), "model_path": None}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two state specs differ; of flags those that the other one has not."""

    name: str
    expected: str
    got: str


def spec_differences(expected: Mapping[str, Any], got: StateSpec) -> list[Difference]:
    """In what a spec that was kept (the fields of a `StateSpec`, of this version or another) and a spec of now differ."""
    found = []
    for name, value in dataclasses.asdict(got).items():
        kept = expected.get(name, "not recorded")
        if name == "flags" and isinstance(kept, Sequence) and not isinstance(kept, str):
            had, has = sorted(set(kept) - set(value)), sorted(set(value) - set(kept))
            if had or has:
                found.append(Difference(name, _flags(had, has), _flags(has, had)))
        elif name != "model_path" and kept != value:
            found.append(Difference(name.replace("_", " "), str(kept), str(value)))
    unknown = sorted(expected.keys() - {field.name for field in dataclasses.fields(got)})
    return found + [Difference(name, str(expected[name]), "unknown to this version") for name in unknown]


def _flags(here: Sequence[str], there: Sequence[str]) -> str:
    return ", ".join(here) or f"none of {', '.join(there)}"


def state_spec(project: Project, facts: ModelFacts, python: Path, device: str, flags: list[str]) -> StateSpec:
    """The spec of what a server with this command would make."""
    settings = project.settings
    return StateSpec(
        model_path=str(settings.model.path),
        revision=settings.model.revision,
        weight_fingerprint=weight_fingerprint(facts.path),
        model_class=facts.model_class,
        dtype=settings.server.dtype,
        sglang_version=sglang_version(python),
        capture_version=CAPTURE_VERSION,
        device=device,
        flags=numeric_flags(flags),
    )


def numeric_flags(flags: list[str]) -> tuple[str, ...]:
    """The flags of a server's command that may change numbers, each with its values, in alphabetical order."""
    grouped: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            grouped.append(word.split("=", 1))
        elif grouped:
            grouped[-1].append(word)
        else:
            raise ConfigError("server.args must begin with a flag", where="server.args", got=word)
    return tuple(sorted(" ".join(group) for group in grouped if group[0] not in _NOT_NUMERIC))


def command_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """`numeric_flags` of a whole command, the model's path with them."""
    begin = next((place for place, word in enumerate(argv) if word.startswith("--")), len(argv))
    return numeric_flags(list(argv[begin:]))


def weight_fingerprint(model: Path) -> str:
    """Hash of a checkpoint: config.json, each shard's header and size, and a few blocks of its bytes.

    The blocks tell two fine-tunes of one architecture apart without reading hundreds of gigabytes.

    Raises:
        ConfigError: there are no safetensors files.
    """
    shards = shard_files(model)
    if not shards:
        raise ConfigError(
            "the model has no safetensors files", where=model, remedy="check model.path; other formats are not read"
        )
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for shard in shards:
        header, start = read_safetensors_header(shard)
        size = shard.stat().st_size
        digest.update(json.dumps([shard.name, size, header], sort_keys=True).encode())
        with shard.open("rb") as file:
            for step in range(_SAMPLES_A_SHARD):
                file.seek(start + (size - start) * step // _SAMPLES_A_SHARD)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def sglang_version(python: Path) -> str:
    """The version of SGLang that an interpreter has, without importing it.

    Raises:
        ServerStartError: it has none, or cannot be run.
    """
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise ServerStartError(
            "SGLang's interpreter cannot be run", where=python, got=error, remedy="check server.python"
        ) from error
    if result.returncode != 0:
        last = result.stderr.strip().rpartition("\n")[2]
        raise ServerStartError("this interpreter has no SGLang", where=python, got=last, remedy="check server.python")
    return result.stdout.strip()
