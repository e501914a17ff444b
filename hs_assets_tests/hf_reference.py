"""The independent reference: hidden states by HF transformers in float32. Runs in SGLang's environment.

    python hf_reference.py MODEL PROMPTS.json OUT.safetensors [DEVICE]

Each prompt goes alone through the model. OUT has for prompt i ``states_i`` [T, n + 1, H]: residual ids 0..n-1 as
``output_hidden_states`` gives them, then the input of the final norm; and ``post_norm_i`` [T, H], its output.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def load(path: Path) -> torch.nn.Module:
    config = json.loads((path / "config.json").read_text())
    if "text_config" not in config:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # transformers has no Kimi-K2.5; its text model is a DeepSeek-V3 under another prefix
    weights = {name.removeprefix("language_model."): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config["text_config"]))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main(path: Path, prompts: list[list[int]], out: Path, device: str = "cpu") -> None:
    model = load(path).to(device).eval()
    seen: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_hook(lambda _, args, output: seen.update(pre=args[0][0], post=output[0]))
    tensors = {}
    with torch.no_grad():
        for i, ids in enumerate(prompts):
            hidden = model(torch.tensor([ids], device=device), output_hidden_states=True, use_cache=False).hidden_states
            tensors[f"states_{i}"] = torch.stack([*(h[0] for h in hidden[:-1]), seen["pre"]], dim=1).cpu()
            tensors[f"post_norm_{i}"] = seen["post"].cpu()
    save_file(tensors, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]), *sys.argv[4:])
