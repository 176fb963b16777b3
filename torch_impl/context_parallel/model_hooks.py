"""Hooks that let an unmodified model, such as a Hugging Face model, run inside a context.

A model may have modules with tokens that are not sharded, compute positions from its local length, and build masks with
one rank's columns. The hooks put such modules into `local_attention`, shard the inputs of layers after positions are
computed, and drop masks that causal attention over the sequence applies anyway.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_impl.collectives import large_tensors
from torch_impl.context_parallel.sdpa_mode import close_scope, layout_inside, open_scope
from torch_impl.contract import Module, Names, Rejected, contract
from torch_impl.layouts import TokenLayout

FUNCTION = "context_parallel.adapt_model_to_context"
# The sequence dim, counted from the last, of arguments of layers and decoders: [b, s, d], [k, b, s, d] for several
# kinds of positions, or ids [b, s].
SEQ_DIMS = {
    "hidden_states": -2,
    "inputs_embeds": -2,
    "position_embeddings": -2,
    "input_ids": -1,
    "position_ids": -1,
    "cache_position": -1,
}


@dataclass(frozen=True)
class ModelHooks:
    """The hooks of one model; `remove` removes them."""

    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove the hooks; the model is then as before."""
        for handle in self.handles:
            handle.remove()


@contract
def adapt_model_to_context(model: Module, *, local: Names | None = None, sharded: Names | None = None) -> ModelHooks:
    """Add hooks to `model` so that it runs unmodified inside a context; outside a context they do nothing.

    `local` and `sharded` are names of modules, or patterns, such as "model.vision_tower" or "*.encoder_attn".

    Modules in `local`, and all modules inside them, run in `local_attention`: vision towers, encoders, cross attention.

    Modules in `sharded` are passed tensors of the full sequence and get this rank's shard of them; tensors that are
    already sharded pass unchanged. If these are a decoder's layers, such as "model.language_model.layers.*", call the
    model with the full sequence on every rank, so that it knows positions and the places of images; it returns this
    rank's shard of the logits. The sharded arguments are hidden_states, inputs_embeds, input_ids, position_ids,
    cache_position and position_embeddings. A batch from `make_cp_batch_and_ctx` is already sharded inside the context.

    Every other module with `is_causal=True`, Hugging Face's mark of causal self-attention, gets no `attention_mask`. A
    mask of the full sequence is read first: it must consist of the causal rule, the module's `sliding_window` and
    padding on the right. The window still applies.

    Each rank's parameter gradients come from its own tokens: sum them over cp.

    Cost:   no collective; a mask of the full sequence is read once by the host for all layers that share it.
    Errors: TypeError if model is not a module or names are not lists of names; ValueError for a name that matches no
            module, an attention that SDPA does not compute, or attention in chunks. Inside a context, ValueError for a
            mask with another rule, or an input that is neither full nor sharded.
    """
    modules = dict(model.named_modules())
    scopes = {id(part): part for module in _matches(modules, "local", local).values() for part in module.modules()}
    is_causal = {name: module for name, module in modules.items() if getattr(module, "is_causal", None) is True}
    attentions = {name: module for name, module in is_causal.items() if id(module) not in scopes}
    for name, module in attentions.items():
        if problem := _attention_problem(module):
            raise Rejected(f"{name} {problem}")
    handles: list[RemovableHandle] = []
    # Each module inside a scope enters it separately, because a checkpoint may recompute any one of them.
    for module in scopes.values():
        handles += _hook_scope(module)
    for name, module in _matches(modules, "sharded", sharded).items():
        handles.append(_hook_inputs(name or type(module).__name__, module))
    seen = _SeenMask()
    for name, module in attentions.items():
        handles += _hook_attention(name, module, seen)
    return ModelHooks(tuple(handles))


def _matches(modules: dict[str, nn.Module], argument: str, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """The modules that match any of the patterns by name; ValueError for a pattern without a match."""
    chosen = {}
    for pattern in patterns or ():
        named = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not named:
            nearest = get_close_matches(pattern, modules, n=1, cutoff=0.0)
            raise Rejected(f"{argument}: {pattern!r} matches no module; nearest is {nearest[0]!r}")
        chosen |= named
    return chosen


def _attention_problem(module: nn.Module) -> str | None:
    """Why a causal attention cannot run inside a context, or None."""
    config = getattr(module, "config", None)
    computed_by = getattr(config, "_attn_implementation", None)
    if computed_by not in (None, "sdpa"):
        return (
            f"is computed by {computed_by!r}, which sees this rank's tokens alone; "
            "load the model with attn_implementation='sdpa'"
        )
    if _layer_type(module) == "chunked_attention":
        return "attends within chunks, which a context does not support; leave it out of cp"
    return None


def _layer_type(module: nn.Module) -> str | None:
    types, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return types[index] if types is not None and index is not None else None


def _window(module: nn.Module) -> int | None:
    """The window of a causal attention: the module's, or its config's if this layer uses a sliding window."""
    if hasattr(module, "sliding_window"):
        own: Any = module.sliding_window
        return own
    if _layer_type(module) not in (None, "sliding_attention"):
        return None
    return getattr(getattr(module, "config", None), "sliding_window", None)


def _hook_scope(module: nn.Module) -> list[RemovableHandle]:
    """Run the module's forward in local attention; the scope is closed even if it raises."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        open_scope(module, is_local=True)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        close_scope(module)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _hook_inputs(name: str, module: nn.Module) -> RemovableHandle:
    """Shard the module's inputs inside a context."""
    names = list(inspect.signature(module.forward).parameters)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = layout_inside()
        if layout is None:
            return None
        # Shard arguments by position or by name; further positional arguments have no known name.
        by_position = [_shard(name, key, x, layout) for key, x in zip(names, args, strict=False)]
        by_name = {key: _shard(name, key, x, layout) for key, x in kwargs.items()}
        return (*by_position, *args[len(names) :]), by_name

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _shard(module: str, name: str, x: Any, layout: TokenLayout) -> Any:
    """This rank's shard of an input; other values, and tensors that are already sharded, are returned unchanged."""
    if isinstance(x, tuple | list) and name in SEQ_DIMS:
        return type(x)(_shard(module, name, part, layout) for part in x)
    if name not in SEQ_DIMS or not isinstance(x, Tensor):
        return x
    dim = x.ndim + SEQ_DIMS[name]
    rows, local_rows = x.shape[dim], layout.counts[layout.cp_rank]
    if rows == layout.total:
        return large_tensors.index_select(x, layout.local_index, dim)
    if rows != local_rows:
        lengths = f"{rows} positions, the sequence has {layout.total} and this rank's shard {local_rows}"
        raise ValueError(f"{FUNCTION}: {module}: {name} has {lengths}; pass the padded batch of the context")
    return x


def _hook_attention(name: str, module: nn.Module, seen: _SeenMask) -> list[RemovableHandle]:
    """Run the module's forward without a mask, and with its window."""
    names = list(inspect.signature(module.forward).parameters)
    place = names.index("attention_mask") if "attention_mask" in names else len(names)
    window = _window(module)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = layout_inside()
        if layout is None:
            return None
        mask = args[place] if place < len(args) else kwargs.get("attention_mask")
        if mask is not None:
            if problem := seen.problem(mask, layout, window):
                raise ValueError(f"{FUNCTION}: {name}: {problem}")
            if place < len(args):
                args = (*args[:place], None, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "attention_mask": None}
        open_scope(module, window=window)
        return args, kwargs

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        close_scope(module)

    hook = module.register_forward_pre_hook(before, with_kwargs=True)
    return [hook, module.register_forward_hook(after, always_call=True)]


class _SeenMask:
    """The last mask that was read, so that layers with the same mask read it once."""

    def __init__(self) -> None:
        self.mask: weakref.ref[Tensor] | None = None
        self.window: int | None = None

    def problem(self, mask: Any, layout: TokenLayout, window: int | None) -> str | None:
        """Why a mask must not be dropped, or None. A mask built from a rank's shard is always dropped."""
        if not isinstance(mask, Tensor):
            return f"attention_mask is a {type(mask).__name__}; load the model with attn_implementation='sdpa'"
        if mask.shape[-1] != layout.total:
            return None
        if self.mask is not None and self.mask() is mask and self.window == window:
            return None
        if not _is_causal(mask, window):
            rule = "the causal rule" if window is None else f"the causal rule with a window of {window}"
            expected = f"is not {rule} and padding on the right, and cp would drop it"
            return f"attention_mask {list(mask.shape)} {expected}; give the module no such mask"
        self.mask, self.window = weakref.ref(mask), window
        return None


def _is_causal(mask: Tensor, window: int | None) -> bool:
    """Whether a mask of the full sequence is the causal rule, a window and padding on the right. One read by the host.

    The mask is [b, h, s, s] or [s, s]; visible keys are True in a bool mask and 0 in an additive one.
    """
    is_seen = mask if mask.dtype == torch.bool else mask == 0
    rows, keys = is_seen.shape[-2:]
    if rows != keys:
        return False
    place = torch.arange(keys, device=mask.device)
    distance = place[:, None] - place
    rule = (distance >= 0) & (distance < (keys if window is None else window))
    # 1. A key is real if the query at its place sees it. With padding on the right all real keys come first.
    is_real = is_seen.diagonal(dim1=-2, dim2=-1)
    on_the_right = (is_real.long().diff() <= 0).all()
    # 2. Ignore padding's queries: they do not affect the outputs of real tokens.
    expected = rule & is_real.unsqueeze(-2)
    return bool(on_the_right & ((is_seen == expected) | ~is_real.unsqueeze(-1)).all())
