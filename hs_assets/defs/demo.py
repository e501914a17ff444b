"""The demo: every partition through a real Dagster instance, so that ``dagster dev`` shows them afterwards."""

import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import dagster as dg

from hs_assets.config import Home, Project, read_preset
from hs_assets.defs.recorded import RAW_DUMPS, SAMPLES
from hs_assets.defs.report_metadata import OTHER_LOGPROB, OWN_LOGPROB
from hs_assets.errors import ConfigError, EngineError, ExtractionError
from hs_assets.extraction.plan import compare
from hs_assets.samples.prompts import table_path
from hs_assets.serving import engine
from hs_assets.serving.launch import Target, expose_plugin, make_launch_plan, resolve
from hs_assets.serving.server import lease_server
from hs_assets.serving.state import ServerFolder
from hs_assets.store.layout import create
from hs_assets.wire.records import write_atomic

_WRITTEN = "# Written by hs-assets demo.\n"
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}

Say = Callable[[str], None]


def write_config(home: Home, model: Path | None, prompts: Path | None) -> None:
    """Make the home's configuration that of a demo with another model or other prompts.

    Raises:
        ConfigError: the home has a configuration that no demo wrote.
    """
    path = home.config
    if path.exists() and not path.read_text().startswith(_WRITTEN):
        raise ConfigError("this home has a configuration of its own", where=path, remedy="choose another home with --home")
    text = read_preset("demo")
    if model is not None:
        text = text.replace('path = "demo"', f"path = {_toml(model)}")
    if prompts is not None:
        text = text.replace('name = "demo"\npath = "package:demo_conversations.jsonl"', f"path = {_toml(prompts)}")
    home.root.mkdir(parents=True, exist_ok=True)
    write_atomic(path, _WRITTEN + text)


def prepare(project: Project, say: Say) -> None:
    """Install the CPU engine and make the demo's model, as far as they are asked for and not there yet."""
    if not project.settings.server.python:
        engine.install(say)
    model = project.settings.model.path
    if model == project.home.demo_model and not (model / "config.json").exists():
        say(f"making a tiny random model in Kimi-K2.5's shape: {model}")
        _make_model(project, model)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a partition: ``problem`` says why it is not complete.

    Tokens and seconds of what was captured; the logprob differences of its own states and of other samples' (see the rule).
    """

    partition: str
    problem: str | None
    tokens: int = 0
    seconds: float = 0.0
    own_logprob: float = 0.0
    other_logprob: float = math.inf


def materialize(project: Project, defs: dg.Definitions, say: Say) -> Iterator[Outcome]:
    """Materialise `layer_set` and then every partition; gives each outcome as it comes.

    Arguments:
        say: is told what is waited for.
    """
    folder = ServerFolder(project.home.server)
    with open_instance(project.home) as instance:
        record, extract = defs.resolve_job_def("record_layer_set"), defs.resolve_job_def("extract")
        if problem := _problem(record.execute_in_process(instance=instance, run_config=_QUIET, raise_on_error=False)):
            raise ExtractionError("layer_set could not be recorded", got=problem)
        keys = extract.partitions_def.get_partition_keys() if extract.partitions_def else ()
        target = resolve(project)
        needed = any(_needs_server(project, target, key) for key in keys)
        # The runs would start the server themselves; started here, its start is seen.
        plan = make_launch_plan(project, target)
        with lease_server(folder, plan, "demo", say, again=True) if needed else nullcontext():
            for key in keys:
                result = extract.execute_in_process(instance=instance, partition_key=key, run_config=_QUIET, raise_on_error=False)
                yield _outcome(key, result)


def _needs_server(project: Project, target: Target, key: str) -> bool:
    """Whether some state of a partition is not stored yet, as far as can be told before its prompts are made."""
    made = table_path(project.home.prompts, key).exists()
    return not made or bool(compare(project, target, create(project.store_path), key).to_capture)


def _outcome(key: str, result: dg.ExecuteInProcessResult) -> Outcome:
    if problem := _problem(result):
        return Outcome(key, problem)
    made = {event.asset_key: event.metadata for event in result.asset_materializations_for_node("extraction")}

    def number(asset: dg.AssetKey, label: str, default: float) -> float:
        entry = made[asset].get(label)
        return default if entry is None else float(str(entry.value))

    return Outcome(
        key,
        None,
        tokens=int(number(RAW_DUMPS, "captured tokens", 0)),
        seconds=number(RAW_DUMPS, "seconds of capture", 0),
        own_logprob=number(SAMPLES, OWN_LOGPROB, 0),
        other_logprob=number(SAMPLES, OTHER_LOGPROB, math.inf),
    )


def _problem(result: dg.ExecuteInProcessResult) -> str | None:
    """Why a run failed; None where it did not."""
    if result.success:
        return None
    data = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    described = [failure.user_failure_data.description for failure in data if failure.user_failure_data]
    errors = [failure.error.cause.message if failure.error.cause else failure.error.message for failure in data if failure.error]
    return "\n".join(filter(None, described)) or "\n".join(errors)


@contextmanager
def open_instance(home: Home) -> Iterator[dg.DagsterInstance]:
    """The home's Dagster instance; its settings are written on first use."""
    folder = home.dagster
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "dagster.yaml").exists():
        write_atomic(folder / "dagster.yaml", (resources.files("hs_assets") / "presets" / "dagster.yaml").read_text())
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        yield instance


def _make_model(project: Project, destination: Path) -> None:
    """Run the model maker in SGLang's environment, aside, and rename its result."""
    python = project.settings.server.python or str(engine.engine_python())
    plugin = expose_plugin(ServerFolder(project.home.server).plugin)
    staging = destination.with_name(destination.name + ".new")
    staging.mkdir(parents=True, exist_ok=True)
    texts = project.settings.prompts.sources[0].path
    environment = {**engine.ENVIRONMENT, "PYTHONPATH": f"{plugin}:{engine.SHIMS}", "PATH": "/usr/bin:/bin"}
    command = [python, "-m", "hs_assets.serving.tiny_model", "kimi_k25", str(staging), str(texts)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EngineError("the demo's model could not be made", where=" ".join(command), got=result.stderr[-2000:])
    staging.rename(destination)


def _toml(path: Path) -> str:
    return f'"{path.absolute()}"'.replace("\\", "\\\\")
