"""Stands in for SGLang's kernel package, which is published for CUDA only.

On a CPU SGLang computes with torch; of this package it calls one function while it serves, and imports the names of a
few more. Those raise if they are ever called.
"""

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(request_indices, token_pool, starts, ends, locations, _pool_length):
    """Note where the keys and values of each request's new tokens lie: one run of `locations` after another."""
    done = 0
    for request, start, end in zip(request_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        token_pool[request, start:end] = locations[done : done + count].to(token_pool.dtype)
        done += count


def __getattr__(name):
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on the CPU engine")

    return absent
