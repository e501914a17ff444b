"""The command, the environment and the plugin path of the server that a configuration asks for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from hs_assets.config import Project
from hs_assets.errors import ConfigError, ServerStartError, SpoolError, WireError
from hs_assets.samples.model import ModelFacts, read_model_facts
from hs_assets.serving import engine
from hs_assets.serving.spec import StateSpec, state_spec
from hs_assets.serving.state import LaunchPlan, ServerFolder
from hs_assets.wire.dump import DumpLayout
from hs_assets.wire.layers import LayerSet
from hs_assets.wire.records import CAPTURE_ENV, CaptureConfig, write_atomic
from hs_assets.wire.source import source_hash
from hs_assets.wire.spool import Spool

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Names of dtypes in the configuration → in safetensors."""

_MIN_SPOOL_BYTES = 64 << 20
_RENDEZVOUS_ENV = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""The ranks meet in a file of the spool: the store that torch opens by itself listens on all interfaces, to anybody."""

_OURS = frozenset(
    {"--model-path", "--host", "--port", "--tp-size", "--tp", "--dtype", "--chunked-prefill-size", "--trust-remote-code"}
)


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: the model's facts, the layer set, the state spec, and the server's command without its port."""

    facts: ModelFacts
    layer_set: LayerSet
    spec: StateSpec
    python: Path
    argv: tuple[str, ...]
    env: dict[str, str]

    @property
    def layout(self) -> DumpLayout:
        """Of a dump of one token, from which the sizes of all follow."""
        return DumpLayout(1, self.layer_set.residual_ids, self.facts.hidden_size, DTYPES[self.spec.dtype])


def resolve(project: Project) -> Target:
    """What a configuration asks for; starts nothing.

    Raises:
        ConfigError: model, layers or server.args cannot be used.
        EngineError: the CPU engine is asked for and not installed.
    """
    settings = project.settings
    server = settings.server
    facts = read_model_facts(settings.model.path)
    on_cpu = not server.python
    python = engine.engine_python() if on_cpu else Path(server.python)
    taken = sorted(_OURS.intersection(word.split("=", 1)[0] for word in server.args))
    if taken:
        raise ConfigError(
            "server.args sets what other settings set", where="server.args", got=taken, remedy="use model.* and server.* instead"
        )
    flags = [
        "--tp-size", str(server.tensor_parallel),
        "--dtype", server.dtype,
        "--chunked-prefill-size", str(server.chunk_tokens),
        "--disable-radix-cache",
        "--skip-server-warmup",
        *(["--trust-remote-code"] if settings.model.trust_remote_code else []),
        *(engine.FLAGS if on_cpu else ["--disable-prefill-cuda-graph"]),
        *server.args,
    ]  # fmt: skip
    argv = (str(python), "-m", "sglang.launch_server", "--model-path", str(settings.model.path), "--host", "127.0.0.1", *flags)
    env = {**(engine.ENVIRONMENT if on_cpu else {}), **server.env}
    if on_cpu:
        env["PYTHONPATH"] = os.pathsep.join([str(engine.SHIMS), *filter(None, [env.get("PYTHONPATH")])])
        if server.tensor_parallel > 1:
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(server.tensor_parallel)))
    return Target(
        facts=facts,
        layer_set=LayerSet.choose(settings.layers, facts.num_layers),
        spec=state_spec(project, facts, python, "cpu" if on_cpu else "cuda", flags),
        python=python,
        argv=argv,
        env=env,
    )


def make_launch_plan(project: Project, target: Target) -> LaunchPlan:
    """The plan for the watchdog, with the plugin made visible to SGLang's interpreter, the spool made and measured.

    Raises:
        SpoolError: the spool is not ours alone, or too small.
    """
    server = project.settings.server
    if not server.url:
        Spool(project.spool_path).make()
    plugin = expose_plugin(ServerFolder(project.home.server).plugin)
    env = {**target.env, "PYTHONPATH": os.pathsep.join([str(plugin), *filter(None, [target.env.get("PYTHONPATH")])])}
    capture = (target.layer_set.id, source_hash(), server.writers, server.backlog_bytes)
    identity = json.dumps([target.argv, sorted(env.items()), target.spec.fingerprint, capture, server.url])
    return LaunchPlan(
        identity=hashlib.sha256(identity.encode()).hexdigest()[:16],
        argv=target.argv,
        env=env,
        spool=str(project.spool_path),
        spool_bytes=spool_budget(project),
        backlog_bytes=server.backlog_bytes,
        residual_ids=target.layer_set.residual_ids,
        state_fingerprint=target.spec.fingerprint,
        model_path=str(target.facts.path),
        model_class=target.facts.model_class,
        sglang_version=target.spec.sglang_version,
        dtype=DTYPES[server.dtype],
        hidden_size=target.facts.hidden_size,
        num_layers=target.facts.num_layers,
        world_size=server.tensor_parallel,
        writers=server.writers,
        logprob_tolerance=project.settings.rules.logprob_tolerance,
        start_timeout_seconds=server.start_timeout_seconds,
        commit_timeout_seconds=server.commit_timeout_seconds,
        idle_stop_seconds=server.idle_stop_seconds,
        url=server.url.rstrip("/"),
    )


def capture_config(plan: LaunchPlan, server: str) -> CaptureConfig:
    """What the capture plugin shall do in a server of that name."""
    return CaptureConfig(
        spool=plan.spool,
        server=server,
        residual_ids=plan.residual_ids,
        state_fingerprint=plan.state_fingerprint,
        writers=plan.writers,
        spool_bytes=plan.spool_bytes,
        backlog_bytes=plan.backlog_bytes,
    )


def server_environment(plan: LaunchPlan) -> dict[str, str]:
    """The environment variables of the server's command, beside those that it inherits."""
    spool = Spool(Path(plan.spool))
    return {_RENDEZVOUS_ENV: f"file://{spool.rendezvous}", **plan.env, CAPTURE_ENV: str(spool.config)}


def spool_budget(project: Project) -> int:
    """Bytes that dumps may take: as configured, or half of what is free, the dumps that lie there already not counted.

    Where the server is somebody else's: as it was told when it was started.

    Raises:
        SpoolError: there is not so much room, or no such spool.
    """
    if project.settings.server.url:
        return read_capture_config(Spool(project.spool_path)).spool_bytes
    root = project.settings.server.spool_root
    held = sum(found.st_blocks * 512 for found in Spool(project.spool_path).data_stats())  # part of the budget, not of the rest
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free + held
    budget = project.settings.server.spool_bytes or free // 2
    if budget > free or budget < _MIN_SPOOL_BYTES:
        raise SpoolError(
            "the spool is too small",
            where=root,
            expected=f"{max(budget, _MIN_SPOOL_BYTES):,} bytes",
            got=f"{free:,} bytes free",
            remedy="containers begin with 64 MB: give docker run --shm-size, or set server.spool_bytes or server.spool_root",
        )
    return budget


def read_capture_config(spool: Spool) -> CaptureConfig:
    """What a server that was started by hand was told to capture.

    Raises:
        SpoolError: its spool is not there, or not ours.
    """
    try:
        config = CaptureConfig.read(spool.config)
    except WireError as error:
        raise SpoolError(
            "the spool of the server that server.url names cannot be reached",
            where=spool.root,
            expected=f"the folder that the server captures into, with {spool.config.name}",
            got=error.got,
            remedy="start the server on this host with what hs-assets server command prints; in a container, with the host's "
            "/dev/shm (docker run -v /dev/shm:/dev/shm); or name its folder in server.spool",
        ) from error
    spool.make()
    return config


def expose_plugin(folder: Path) -> Path:
    """A folder that holds this very package and its entry points, and nothing else of this environment; for PYTHONPATH.

    So the server always runs the source that the pipeline has, whatever is installed in SGLang's environment.

    Raises:
        ConfigError: PYTHONPATH cannot name the folder.
    """
    try:
        distribution = importlib.metadata.distribution("hs-assets")
    except importlib.metadata.PackageNotFoundError as error:
        raise ServerStartError(
            "hs-assets is not installed in this environment", remedy="pip install -e . in the checkout"
        ) from error
    if os.pathsep in str(folder):
        raise ConfigError(
            f"SGLang finds no plugin in a path with {os.pathsep!r}, which PYTHONPATH would cut there",
            where=folder,
            remedy="choose another home (--home, HS_ASSETS_HOME)",
        )
    info = folder / f"hs_assets-{distribution.version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        write_atomic(info / name, distribution.read_text(name) or "")
    link = folder / f".hs_assets.{secrets.token_hex(4)}"  # renamed into place: others may be at the same
    link.symlink_to(Path(__file__).resolve().parents[1])
    link.replace(folder / "hs_assets")
    return folder
