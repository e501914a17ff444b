"""Hidden states as SpecForge's and ModelOpt's transformers paths make them; runs in an environment with torch.

    python transformers_batches.py MODEL FOLDER DTYPE        FOLDER has prompts.json, and takes the samples

Padded batches of 8, ``output_hidden_states=True``, one ``torch.save`` a sample. Prints seconds and bytes, without the load.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

BATCH = 8


def main(model_path: str, folder: Path, dtype: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).to(device).eval()
    prompts = json.loads((folder / "prompts.json").read_text())
    layers = model.config.num_hidden_layers
    kept = (1, layers // 2, layers - 1, layers)
    with torch.no_grad():
        model(torch.tensor([prompts[0][:64]], device=device))
        before, began, size = time.process_time(), time.monotonic(), 0
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            longest = max(len(ids) for ids in batch)
            ids = torch.tensor([p + [0] * (longest - len(p)) for p in batch], device=device)
            mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in batch], device=device)
            states = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
            for row, prompt in enumerate(batch):
                path = folder / f"{start + row}.pt"
                torch.save({"hidden_states": [states[i][row, : len(prompt)].cpu().clone() for i in kept]}, path)
                size += path.stat().st_size
                path.unlink()
        seconds, cpu = time.monotonic() - began, time.process_time() - before
    print(json.dumps({"seconds": seconds, "bytes": size, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
