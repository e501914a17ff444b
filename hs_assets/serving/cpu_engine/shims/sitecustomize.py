"""On PYTHONPATH of every process of the CPU engine: lets torchvision import beside a CPU build of torch.

torchvision's wheel brings an extension that links to CUDA's torch and so does not load; without it, registering the
fake kernels of its operators fails. Declaring the two operators first is enough, for SGLang uses only its transforms.
Nothing is imported until torchvision is.

SGLang imports for some 10 s of processor time in each of its three processes, a sixth of it in looking for garbage among
what the imports make, nearly all of which stays: it is looked for less often.
"""

import gc
import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _DeclareOperators.library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                _DeclareOperators.library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


gc.set_threshold(50_000)
sys.meta_path.insert(0, _DeclareOperators())
