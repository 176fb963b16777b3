"""Sort a model's parameters into matrices, embeddings and vectors, for weight decay and for Muon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torch_impl.contract import Module, Names, Rejected, contract

EMBEDDINGS = ("*embed*", "*lm_head*")


@dataclass(frozen=True)
class ParameterKinds:
    """A model's parameters by name and in its order, in three dicts. A tied parameter is listed under its first name.

    `matrices` are [..., m, n] with m and n above 1; `embeddings` are the input and output tables with a row for each
    token; `vectors` are all others: norms, biases, depthwise convolutions.
    """

    matrices: dict[str, nn.Parameter] = field(default_factory=dict)
    embeddings: dict[str, nn.Parameter] = field(default_factory=dict)
    vectors: dict[str, nn.Parameter] = field(default_factory=dict)

    def decay_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for a torch optimizer: vectors without weight decay, all others with `weight_decay`.

        torch.optim.AdamW(parameter_kinds(model).decay_groups(0.1), lr=3e-4)
        """
        decayed = [*self.matrices.values(), *self.embeddings.values()]
        return _without_empty(({"params": decayed, "weight_decay": weight_decay}, self._undecayed))

    def adamw_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for AdamW beside Muon: embeddings with `weight_decay`, vectors without."""
        embeddings = {"params": list(self.embeddings.values()), "weight_decay": weight_decay}
        return _without_empty((embeddings, self._undecayed))

    @property
    def _undecayed(self) -> dict[str, Any]:
        return {"params": list(self.vectors.values()), "weight_decay": 0.0}


@contract
def parameter_kinds(model: Module, embeddings: Names | None = None) -> ParameterKinds:
    """Sort the parameters of `model` that require a gradient into matrices, embeddings and vectors.

    The weight of an `nn.Embedding` is an embedding, and so is a matrix whose name matches one of the patterns
    `embeddings`, by default "*embed*" and "*lm_head*", for the output layer. A bias is a vector, whatever its dims:
    each expert may have its own. A DTensor counts by its full shape.

    Errors: TypeError if model is not a module or embeddings is not a list of names; ValueError for a pattern that
            matches no parameter.
    """
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    patterns = EMBEDDINGS if embeddings is None else embeddings
    kinds, used = ParameterKinds(), set()
    for name, parameter in model.named_parameters():
        matches = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        used |= matches
        if not parameter.requires_grad:
            continue
        is_matrix = not name.endswith("bias") and parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1
        if not is_matrix:
            kinds.vectors[name] = parameter
        elif matches or id(parameter) in tables:
            kinds.embeddings[name] = parameter
        else:
            kinds.matrices[name] = parameter
    unused = [pattern for pattern in embeddings or () if pattern not in used]
    if unused:
        raise Rejected(
            f"{unused[0]!r} matches no parameter of {type(model).__name__}; "
            "pass patterns of parameters' names, as model.named_parameters() gives them"
        )
    return kinds


def _without_empty(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group["params"]]
