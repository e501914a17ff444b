"""Reads exports with the trainers' own loaders, and with torch alone. Runs in SGLang's environment, with their packages.

    python read_exports.py WHAT SOURCE OUT.npz [WHAT SOURCE OUT.npz ...]

WHAT is a loader (specforge, speculators, speculators-legacy, modelopt) or plain, and SOURCE an export; or norm, of states in
an npz file; or vocabulary, of token counts in one. OUT has for sample i, in
the order in which the loader gives them, ``i/<tensor>``; bfloat16 as its bits, in uint16.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

MAX_LENGTH = 1 << 20


def as_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def specforge(root: str) -> list[dict[str, torch.Tensor]]:
    """Batches of two through the whole data plane, then the shift that their trainer makes."""
    from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    refs = OfflineManifestReader(root, max_len=MAX_LENGTH, validate_files=True).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=refs,
        batch_size=2,
        drop_last=False,
        per_sample_transform=partial(normalize_offline_sample, max_len=MAX_LENGTH),
        collate_fn=build_offline_collator(),
    )
    samples = []
    for batch in loader:
        tensors = batch.tensors
        for i in range(len(tensors["input_ids"])):
            length = int(tensors["attention_mask"][i].sum())
            sample = {name: tensors[name][i : i + 1, :length] for name in ("input_ids", "hidden_state", "target", "loss_mask")}
            ids, target, mask = TargetHead.preprocess(None, sample["input_ids"], sample["target"], sample["loss_mask"])
            trained = {"trained_ids": ids[0], "trained_target": target[0], "trained_mask": mask[0, :, 0]}
            stored = {name: tensor[0] for name, tensor in sample.items()}
            samples.append({**stored, **trained, "trained_aux": stored["hidden_state"]})
    return samples


def speculators(root: str) -> list[dict[str, torch.Tensor]]:
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    dataset = ArrowDataset(max_len=MAX_LENGTH, datapath=root, on_missing="raise")
    samples = []
    for i in range(len(dataset)):
        sample = dataset[i]
        length, hidden_size = sample["verifier_last_hidden_states"].shape
        assert dataset.approx_lengths[i] == length
        batch = CollateFn(length - 1, hidden_size, preprocess=shift_batch)([dict(sample)])
        samples.append({**sample, **_trained(batch)})
    return samples


def speculators_legacy(root: str) -> list[dict[str, torch.Tensor]]:
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import SampleFileDataset

    files = sorted(str(path) for path in Path(root).rglob("*.pt"))
    dataset = SampleFileDataset(max_len=MAX_LENGTH, file_list=files, hidden_states_dtype=torch.bfloat16)
    samples = [dataset[i] for i in range(len(dataset))]
    return [{**sample, **_trained({k: v[None] for k, v in shift_batch(dict(sample)).items()})} for sample in samples]


def _trained(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "trained_ids": batch["input_ids"][0],
        "trained_aux": batch["hidden_states"][0],
        "trained_target": batch["verifier_last_hidden_states"][0],
        "trained_mask": batch["loss_mask"][0],
    }


def modelopt(root: str) -> list[dict[str, torch.Tensor]]:
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = sorted(str(path) for path in Path(root).glob("**/*.pt"))
    dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    samples = []
    for i in range(len(dataset)):
        sample = dataset[i]
        batch = EagleOfflineDataCollator(len(sample["input_ids"]))([sample])
        outputs = batch["base_model_outputs"]
        # HFEagleModel.forward at the first step: predictions after token i + 1 and the mask of it, for position i
        trained = {
            "trained_ids": batch["input_ids"][0].roll(-1)[:-1],
            "trained_aux": outputs["aux_hidden_states"][0, :-1],
            "trained_target": outputs["base_model_hidden_states"][0, 1:],
            "trained_mask": batch["loss_mask"][0, 1:],
        }
        prenorm = torch.tensor(sample.pop("base_hidden_prenorm"))
        samples.append({**sample, **trained, "prenorm": prenorm})
    return samples


def plain(root: str) -> list[dict[str, torch.Tensor]]:
    """Every file of torch.save, with torch alone and nothing but tensors and plain values allowed in it."""
    files = sorted(str(path) for suffix in ("ckpt", "pt", "pth") for path in Path(root).rglob(f"*.{suffix}"))
    samples = []
    for file in files:
        for mmap in (True, False):
            value = torch.load(file, weights_only=True, mmap=mmap)
            flat = value if isinstance(value, dict) else {"tensor": value}
            states = flat.pop("hidden_states", None)
            if isinstance(states, list):
                flat |= {f"hidden_states_{i}": state for i, state in enumerate(states)}
            elif states is not None:
                flat["hidden_states"] = states
        samples.append({name: torch.as_tensor(v) for name, v in flat.items() if not isinstance(v, str)})
    return samples


def norm(states: str) -> list[dict[str, torch.Tensor]]:
    """The RMSNorm of transformers, in bfloat16."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    given = np.load(states)
    module = LlamaRMSNorm(len(given["weight"]), eps=float(given["eps"])).to(torch.bfloat16)
    module.weight.data = torch.from_numpy(given["weight"]).to(torch.bfloat16)
    with torch.no_grad():
        return [{"normed": module(torch.from_numpy(given["bits"].view(np.int16)).view(torch.bfloat16))}]


def vocabulary(counts: str) -> list[dict[str, torch.Tensor]]:
    """The mapping that speculators would make of token counts."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    given = np.load(counts)
    frequencies = dict(zip(given["ids"].tolist(), given["counts"].tolist(), strict=True))
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, int(given["draft_size"]), int(given["target_size"]))
    return [{"d2t": d2t, "t2d": t2d}]


READERS = {
    "specforge": specforge,
    "speculators": speculators,
    "speculators-legacy": speculators_legacy,
    "modelopt": modelopt,
    "plain": plain,
    "norm": norm,
    "vocabulary": vocabulary,
}

if __name__ == "__main__":
    jobs = sys.argv[1:]
    for what, source, out in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        samples = READERS[what](source)
        np.savez(out, **{f"{i}/{name}": as_array(value) for i, sample in enumerate(samples) for name, value in sample.items()})
