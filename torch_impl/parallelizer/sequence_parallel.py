"""Sequence parallelism on top of tensor parallelism: between its layers a block has s/tp positions on each rank.

    norm, dropout, residual   "b s/tp d"        attention, mlp   "b s d" in, "b s d" out; each rank keeps s/tp of it

The first block of a list shards the sequence and the last block gathers it, so that everything outside the blocks,
positions and masks included, is unchanged. In a layer of column-wise and row-wise modules an all-gather before and a
reduce-scatter after the layer replace the all-reduce, with the same total bytes. A norm's gradient from a shard of the
sequence is partial and is summed. A layer with a part that every rank computes in full, such as a router of experts,
keeps its all-reduce and gathers as well: a sum over ranks would count that part once per rank, and a router's losses
need all positions. Source: arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from torch_impl.parallelizer._torch_compat import register_first
from torch_impl.parallelizer.async_styles import SEQUENCE, AsyncColwise, LayerInput, async_entries
from torch_impl.parallelizer.blocks import blocks
from torch_impl.parallelizer.head_styles import PerHead, ReplicatedHeads
from torch_impl.parallelizer.tp_plan import PlanEntry
from torch_impl.parallelizer.tp_styles import Experts, Replicated, ReplicatedOnShards, Rowwise

HIDDEN = "hidden_states"  # transformers' keyword for the input of a layer
KEY = "sequence_parallel"  # stands for the plan's key


def sequence_styles(
    model: nn.Module, styles: Mapping[str, PlanEntry], experts: Collection[str] = (), is_async: bool = False
) -> tuple[dict[str, PlanEntry], list[str]]:
    """Adapt styles to blocks with sharded sequences; returns them, and the names of layers that gather their input.

    Every norm of a block gets a style; the row-wise module at the end of a layer scatters its output. `experts` names
    the modules of experts over ep, which have no style. With `is_async` layers get the styles of rings that can.

    Errors: ValueError for a model without blocks, a block with parameters of its own, a linear layer directly in a
            block whose style cannot take or return shards of the sequence, experts directly in a block, and with
            `is_async` a model in which no layer can have rings.
    """
    changed, gathering, has_rings = dict(styles), [], False
    names = {id(module): name for name, module in model.named_modules()}
    model_blocks = blocks(model)
    if not model_blocks:
        raise ValueError(f"sequence_parallel=True: {type(model).__name__} has no list of blocks; pass False")
    for block in model_blocks:
        name = names[id(block)]
        if (leaf := next((leaf for leaf, _ in block.named_parameters(recurse=False)), None)) is not None:
            raise ValueError(
                f"sequence_parallel=True: {name!r} has the parameter {leaf!r} of its own; its gradient would cover "
                "only this rank's positions; pass False"
            )
        for leaf, layer in block.named_children():
            path = f"{name}.{leaf}"
            if path in experts or (path in styles and isinstance(styles[path].style, Experts)):
                # Only the hidden states are gathered before a layer, and experts have further arguments.
                raise ValueError(
                    f"sequence_parallel=True: {path!r} of a block has experts; their choices and gates would cover "
                    "only this rank's positions; pass False, or put router and experts into one layer"
                )
            if path in styles and not isinstance(styles[path].style, PerHead):
                changed[path] = _direct_layer_entry(path, styles[path])
            elif _is_norm(layer):
                changed[path] = PlanEntry(KEY, ReplicatedOnShards())
            elif next(layer.parameters(), None) is not None:
                gathering.append(path)
                if (last := _last_rowwise(path, layer, styles)) is not None:
                    rings = async_entries(path, layer, styles, last) if is_async else {}
                    changed |= rings or {last: _scattered(styles[last])}
                    has_rings |= bool(rings)
    if is_async and not has_rings:
        raise ValueError(
            f"enable_async_tensor_parallel=True: no layer of {type(model).__name__} has column-wise modules and one "
            "row-wise module behind them in the plan, all without adapters; pass False"
        )
    return changed, gathering


def shard_sequences(
    model: nn.Module,
    styles: Mapping[str, PlanEntry],
    gathering: list[str],
    mesh: DeviceMesh,
    changed: Mapping[str, PlanEntry],
) -> list[nn.Module]:
    """Add hooks, in place: layers gather the sequence, each list's first block shards it, and its last gathers it.
    Returns the last blocks, whose outputs are then views.

    `styles` are the styles before `sequence_styles` changed them. Call it after the `changed` styles were applied.
    """
    # 1. Hook the layers.
    for path in gathering:
        layer = model.get_submodule(path)
        is_summed = _last_rowwise(path, layer, styles) is not None
        rings = [
            e.style for name, e in changed.items() if name.startswith(f"{path}.") and type(e.style) is AsyncColwise
        ]
        if rings:
            layer_input = rings[0].layer_input
            register_first(layer, partial(_multiply_before, mesh, layer_input), with_kwargs=True)
            layer.register_forward_hook(layer_input.clear, always_call=True)
            continue
        # This runs before the styles' hooks, which expect the full sequence.
        register_first(layer, partial(_gather_before, mesh, is_summed), with_kwargs=True)
        if not is_summed:
            layer.register_forward_hook(partial(_shard_after, mesh))
    # 2. Hook the first and the last block of each list.
    names = {id(module): name for name, module in model.named_modules()}
    lists: dict[str, list[nn.Module]] = {}
    for block in blocks(model):
        lists.setdefault(names[id(block)].rpartition(".")[0], []).append(block)
    for first, *rest in lists.values():
        first.register_forward_pre_hook(partial(_shard_before, mesh), with_kwargs=True)
        [first, *rest][-1].register_forward_hook(partial(_gather_after, mesh))
    return [each[-1] for each in lists.values()]


def check_lengths(model: nn.Module, mesh: DeviceMesh) -> None:
    """Reject ids or embeddings whose length tp does not divide when the model is called. Call it after FSDP.

    The first block rejects them too, but then each rank has looked up its ids and gathered the model's own parameters.
    """
    register_first(model, partial(_check_length, mesh), with_kwargs=True)


def shard_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's positions.

        x  "b s ... tp=I"   ->   "b s/tp ..."

    Cost: backward 1 all_gather.
    """
    # tp=I -> s/tp
    full = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return full.redistribute(placements=[Shard(SEQUENCE)]).to_local()


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """All positions, whose gradient is the same on each rank.

        x  "b s/tp ..."   ->   "b s ... tp=I"

    Cost: forward 1 all_gather.
    """
    # s/tp -> tp=I
    return _gathered(x, mesh).to_local()


def _gathered(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """All positions, as a DTensor: its partial gradients are summed and scattered in one collective."""
    return DTensor.from_local(x, mesh, [Shard(SEQUENCE)], run_check=False).redistribute(placements=[Replicate()])


# ---- Changed styles


def _direct_layer_entry(path: str, entry: PlanEntry) -> PlanEntry:
    """The entry of a linear layer directly in a block."""
    if type(entry.style) is ColwiseParallel and entry.style.input_layouts == (Replicate(),):
        style = ColwiseParallel(input_layouts=Shard(SEQUENCE), output_layouts=entry.style.output_layouts[0])
        return PlanEntry(entry.key, style)
    if _is_rowwise(entry.style):
        return _scattered(entry)
    if isinstance(entry.style, ReplicatedOnShards):
        return entry
    raise ValueError(
        f"sequence_parallel=True: {path!r} of a block is {type(entry.style).__name__}, which takes the full sequence; "
        "pass False, or leave it out of the plan"
    )


def _scattered(entry: PlanEntry) -> PlanEntry:
    style: Any = entry.style
    scattered = type(style)(input_layouts=style.input_layouts[0], output_layouts=Shard(SEQUENCE))
    return PlanEntry(entry.key, scattered)


def _last_rowwise(path: str, layer: nn.Module, styles: Mapping[str, PlanEntry]) -> str | None:
    """The row-wise module at the end of a layer, if all the layer's parameters take part in the sum; else None."""
    inside = {name: entry.style for name, entry in styles.items() if name.startswith(f"{path}.")}
    rowwise = [name for name, style in inside.items() if _is_rowwise(style)]
    # The sum of gradients would count a part that every rank computes in full once per rank.
    is_summed = all(_takes_part(style) for style in inside.values())
    styled = {
        f"{name}.{leaf}" for name in inside for leaf, _ in layer.get_submodule(name[len(path) + 1 :]).named_parameters()
    }
    if path in styles:  # `per_head`, the only style of a layer itself
        styled |= {f"{path}.{leaf}" for leaf, _ in layer.named_parameters(recurse=False)}
    is_covered = all(f"{path}.{leaf}" in styled for leaf, _ in layer.named_parameters())
    return rowwise[0] if is_summed and is_covered and len(rowwise) == 1 else None


def _takes_part(style: Any) -> bool:
    if type(style) is Replicated:
        return False
    return type(style) is ColwiseParallel or _is_rowwise(style) or type(style) in (ReplicatedOnShards, ReplicatedHeads)


def _is_rowwise(style: Any) -> bool:
    return type(style) in (RowwiseParallel, Rowwise) and style.output_layouts == (Replicate(),)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children()) and any(True for _ in module.parameters())


# ---- Hooks


def _gather_before(mesh: DeviceMesh, is_summed: bool, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _with_first(args, kwargs, lambda x: _gathered(x, mesh) if is_summed else gather_sequence(x, mesh))


def _multiply_before(mesh: DeviceMesh, layer_input: LayerInput, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _with_first(args, kwargs, lambda x: layer_input.multiply(x, mesh))


def _shard_before(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def shard(x: Tensor) -> Tensor:
        _check_divides(x.shape[SEQUENCE], mesh)
        return shard_sequence(x, mesh)

    return _with_first(args, kwargs, shard)


def _check_length(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> None:
    ids, embeds = args[0] if args else kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
        _check_divides(ids.shape[SEQUENCE], mesh)
    if isinstance(embeds, Tensor):
        _check_divides(embeds.shape[SEQUENCE], mesh)


def _check_divides(length: int, mesh: DeviceMesh) -> None:
    """Errors: ValueError for a length that tp does not divide."""
    if length % mesh.size():
        above = -(-length // mesh.size()) * mesh.size()
        raise ValueError(
            f"sequence_parallel=True: a sequence of {length} positions does not divide by tp={mesh.size()}; "
            f"pad to {above}"
        )


def _shard_after(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    return _with_first_output(output, lambda y: shard_sequence(y, mesh))


def _gather_after(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    return _with_first_output(output, lambda y: gather_sequence(y, mesh))


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first one changed: the hidden states of a layer or block."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, HIDDEN: change(kwargs[HIDDEN])}


def _with_first_output(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
