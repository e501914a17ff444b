"""The final norm as SGLang's models apply it, fused with the last residual. Runs in SGLang's environment.

    python server_norm.py STATES.npz OUT.npz [STATES.npz OUT.npz ...]

STATES has ``hidden`` and ``residual``, uint16 [N, H] as bfloat16, ``weight`` float32 [H] and ``eps``. OUT has the two sides
of the norm: ``before``, what the capture sees, and ``after``, what the output head gets; both as bfloat16 bits.
"""

import sys

import numpy as np
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler


def main(source: str, out: str) -> None:
    given = np.load(source)
    norm = RMSNorm(len(given["weight"]), eps=float(given["eps"])).to(torch.bfloat16)
    norm.weight.data = torch.from_numpy(given["weight"]).to(torch.bfloat16)
    hidden, residual = (torch.from_numpy(given[name].view(np.int16)).view(torch.bfloat16) for name in ("hidden", "residual"))
    with torch.no_grad():
        after, before = norm(hidden, residual)
    np.savez(out, **{name: t.view(torch.int16).numpy().view(np.uint16) for name, t in (("before", before), ("after", after))})


if __name__ == "__main__":
    set_global_server_args_for_scheduler(ServerArgs(model_path="none", device="cpu"))
    for source, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(source, out)
