"""Runs in SGLang's environment: what its own parsing makes of flags, and why capture will not run with them.

python parse_flags.py MODEL_PATH < lists of flags, JSON     prints for each a list of reasons, or the parser's refusal
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

from sglang.srt.server_args import prepare_server_args

from hs_assets.capture.supported import violations


def reasons(model: str, flags: list[str]) -> list[str]:
    os.environ.pop("SGLANG_ENABLE_DELAY_SAMPLE", None)
    if flags[:1] == ["SGLANG_ENABLE_DELAY_SAMPLE=1"]:
        os.environ["SGLANG_ENABLE_DELAY_SAMPLE"] = "1"
        flags = flags[1:]
    try:
        arguments = prepare_server_args(["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native", *flags])
    except (Exception, SystemExit) as error:
        return [f"SGLang itself: {error!r}"]
    return violations(arguments, "0.5.23", "LlamaForCausalLM")


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        found = [reasons(sys.argv[1], flags) for flags in json.load(sys.stdin)]
    print(json.dumps(found))
