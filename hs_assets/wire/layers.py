"""Residual ids: the one way this project names a layer's states, and its conversions to everybody else's.

Residual id ``i`` in ``0..n-1`` is the residual stream that *enters* decoder layer ``i`` (``0`` is the embedding output);
``n``, the number of layers, is the stream that leaves the last layer, before the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hs_assets.errors import ConfigError

EAGLE3_DEFAULT = "eagle3"


@dataclass(frozen=True, slots=True)
class LayerSet:
    """The residual ids that one view of the store offers: some auxiliary ones, ascending, and the final one.

    Example: ``LayerSet((3, 31, 59), 61).id == "r3-31-59-61"``.
    """

    aux: tuple[int, ...]
    final: int

    def __post_init__(self) -> None:
        ascending = list(self.aux) == sorted(set(self.aux))
        if not self.aux or not ascending or self.aux[0] < 0 or self.aux[-1] >= self.final:
            raise ConfigError(
                "these layers are no layer set",
                where="layers",
                expected=f"one or more different residual ids, ascending, each in 0..{self.final - 1}",
                got=list(self.aux),
                remedy="a residual id is the input of that decoder layer; the final state is added by itself",
            )

    @property
    def residual_ids(self) -> tuple[int, ...]:
        """All ids in the order of the slots of a dump: the auxiliary ones, then the final one."""
        return (*self.aux, self.final)

    @property
    def id(self) -> str:
        """The readable id, used as a folder name: ``r`` and the ids joined by ``-``."""
        return "r" + "-".join(str(i) for i in self.residual_ids)

    @classmethod
    def parse(cls, text: str) -> LayerSet:
        """The inverse of `id`."""
        if not re.fullmatch(r"r\d+(-\d+)+", text):
            raise ConfigError("not a layer set id", where=text, expected="such as r3-31-59-61")
        *aux, final = (int(part) for part in text[1:].split("-"))
        made = cls(tuple(aux), final)
        if made.id != text:
            raise ConfigError("not a layer set id", where=text, expected=made.id)
        return made

    @classmethod
    def choose(cls, layers: Iterable[int] | str, num_layers: int) -> LayerSet:
        """The layer set that a configuration asks for: explicit ids, or the word ``eagle3`` for ``[2, n//2, n-3]``."""
        if isinstance(layers, str):
            if layers != EAGLE3_DEFAULT:
                raise ConfigError(
                    "unknown name of a layer set", where="layers", expected=f"a list of ids, or {EAGLE3_DEFAULT!r}", got=layers
                )
            default = (2, num_layers // 2, num_layers - 3)
            if list(default) != sorted(set(default)):
                raise ConfigError(
                    f"a model of {num_layers} layers is too small for the usual EAGLE-3 layers",
                    where="layers",
                    expected="three different ids from [2, n//2, n-3]",
                    got=list(default),
                    remedy=f"name the residual ids in layers, each in 0..{num_layers - 1}",
                )
            return cls(default, num_layers)
        return cls(tuple(layers), num_layers)


def to_hf_index(residual_id: int, num_layers: int) -> int | None:
    """Index into HF transformers' ``output_hidden_states``; None for the final one (their last entry is post-norm)."""
    return residual_id if residual_id < num_layers else None


def to_speculators_id(residual_id: int) -> int:
    """The id in vLLM's and speculators' configurations: the same numbers as ours."""
    return residual_id


def to_layer_input(residual_id: int, num_layers: int) -> int | None:
    """SGLang's ``layers_to_capture`` when set directly: the input of that layer; None for the final one."""
    return residual_id if residual_id < num_layers else None


def to_layer_output(residual_id: int) -> int | None:
    """The 0-based "output of layer" numbering (SpecForge, ModelOpt); None for the embedding output."""
    return residual_id - 1 if residual_id > 0 else None
