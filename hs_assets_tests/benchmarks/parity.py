"""Captured states against HF transformers on whatever machine this runs, in float32; test_parity.py is the same on the CPU.

    python -m hs_assets_tests.benchmarks.parity --model PATH --python SGLANG_PYTHON --layers "1, 14, 27" [--machine-args "…"]

Prints the largest difference over all rows and exits with 1 if it is above the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open

from hs_assets.samples.eagle3 import load_sample
from hs_assets.samples.prompts import Prompt
from hs_assets.serving.client import CaptureClient, Captured, ClientSettings
from hs_assets.serving.launch import make_launch_plan, resolve
from hs_assets.serving.server import lease_server, stop_server
from hs_assets.serving.state import ServerFolder
from hs_assets_tests.benchmarks.capture import machine_of, project_of, say
from hs_assets_tests.plugins import make_plugin

SHARES = (0.01, 0.1, 0.25, 0.5, 0.99, 1.0, 1.01, 1.5, 1.99, 2.0, 2.01, 2.5, 2.9, 3.0, 0.3, 0.7)
"""Lengths of the 16 prompts, in chunks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default="")
    parser.add_argument("--layers", default="1, 3, 5")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--machine-args", default="")
    parser.set_defaults(dtype="float32", writers=4, spool_gib=0, store="", unproven="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        native = Path(__file__).with_name("native_operators.py")
        arguments.plugin = make_plugin(Path(folder) / "native", native) if arguments.python else ""
        project = project_of(Path(folder), arguments)
        target = resolve(project)
        say(machine_of(str(target.python), target))
        random, lengths = np.random.default_rng(7), [max(1, int(share * arguments.chunk_tokens)) for share in SHARES]
        highest = target.facts.vocab_size - 9
        prompts = [Prompt.supervised(row, random.integers(9, highest, length)) for row, length in enumerate(lengths)]
        server = ServerFolder(project.home.server)
        try:
            with (
                lease_server(server, make_launch_plan(project, target), "parity", say) as state,
                CaptureClient(server, state, target.layout, ClientSettings(16, 300, 60), say) as client,
            ):
                outcomes = list(client.capture("parity", prompts))
                for failed in (o for o in outcomes if o is not None and not isinstance(o, Captured)):
                    raise SystemExit(f"prompt {failed.prompt.row}: {failed.reason}: {failed.detail}")
                samples = {o.prompt.row: load_sample(o.prompt, o.files) for o in outcomes if isinstance(o, Captured)}
                ours = [samples[prompt.row].states.copy() for prompt in prompts]
                say(f"chunks {[samples[prompt.row].commit.chunks for prompt in prompts]}")
        finally:
            stop_server(server, say, force=True)
            shutil.rmtree(project.spool_path, ignore_errors=True)
        reference = Path(folder) / "reference.safetensors"
        (Path(folder) / "prompts.json").write_text(json.dumps([prompt.input_ids.tolist() for prompt in prompts]))
        script = Path(__file__).resolve().parents[1] / "hf_reference.py"
        words = [
            str(target.python),
            str(script),
            str(arguments.model),
            f"{folder}/prompts.json",
            str(reference),
            arguments.device,
        ]
        subprocess.run(words, env={**os.environ, **target.env}, check=True)
        worst = 0.0
        with safe_open(reference, "numpy") as tensors:
            for row, states in enumerate(ours):
                theirs = tensors.get_tensor(f"states_{row}")[:, list(target.layer_set.residual_ids)]
                worst = max(worst, float(np.abs(states - theirs).max()))
        rows = sum(len(states) for states in ours)
        largest = max(float(np.abs(states).max()) for states in ours)
        print(
            f"largest difference {worst:.2e} where states reach {largest:.1f}, {rows} rows of residual ids {target.layer_set.id}"
        )
    sys.exit(worst > arguments.tolerance)


if __name__ == "__main__":
    main()
