"""Types one scheme line by line, in a process of its own: `python -m shardproof.line_types.body`.

The scheme's function runs once, as rank 0 of a mesh of torch's fake backend, on this rank's shards of one case. It
computes nothing of use: no message is sent. `spmd-types` follows the type of each tensor on each axis, from the specs
of the inputs to the specs of the outputs, and raises at the line where two types do not go together.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import spmd_types as st
import torch
import torch.distributed as dist
from spmd_types import checker
from spmd_types.types import format_axis
from torch.distributed.device_mesh import init_device_mesh

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, nested, outputs_by_name
from shardproof.endings.raised import RAISED
from shardproof.engines.program import Program, ProgramCall
from shardproof.line_types import rules
from torch_impl.collectives.mesh import MeshView

# Messages of the checker that say two types do not go together. Any other message says that it cannot follow the code.
CLASHES = {
    r"Partial type on axis (\S+) cannot propagate": "partial value over {axis} in {call}",
    r"Partial type on axis (\S+) cannot combine with Varying": "partial value over {axis} beside a shard in {call}",
    r"Partial type on axis (\S+) in a linear op": "partial value over {axis} beside one that is not in {call}",
    r"Partial in multiple factors of multilinear op on axis (\S+)": "partial value over {axis} twice in {call}",
    r"Invariant type on axis (\S+) cannot mix": "{axis}=I beside another type in {call}: its gradient lacks a sum",
}
# What they ask of a term need not be asked of the sum: a rank may tell the others, as of a NaN.
PREDICATES = {"any", "all", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "signbit"}
# A term in another dtype is a term, and a new tensor of its shape says nothing of its value.
CASTS = {"to", "double", "float", "half", "bfloat16", "type", "type_as", "zeros_like", "ones_like", "empty_like"}
NO_CLASH = PREDICATES | CASTS | {"__set__"}  # the last assigns an attribute, such as `grad`
AGREE = "types agree where they can be followed"
OF_A_RULE = re.compile(r"rules\.(\w+)\(.*\) expects its input to be (\S+) on axis (\S+), but it is (\w)")


class TypedMesh(MeshView):
    """A mesh whose global ids have the type of the shard that they are."""

    def __init__(self, device_mesh: Any, shardings: Any = None, typed: tuple[str, ...] = ()) -> None:
        super().__init__(device_mesh, shardings)
        self.typed = typed

    def bind(self, shardings: Any) -> TypedMesh:
        return TypedMesh(self.device_mesh, shardings, self.typed)

    def global_ids(self, dim: str) -> torch.Tensor:
        with st.no_typecheck():
            ids = super().global_ids(dim)
        axes = tuple(axis for axis, _ in self._sharding(dim)[1] if axis in self.typed)
        typed = {axis: st.V if axis in axes else st.R for axis in self.typed}
        return _assert(ids, typed, [axes], self)


def typed_axes(program: Program) -> dict[str, str]:
    """The axes of a scheme, each with the layout that keeps it from being typed, or an empty text."""
    layouts = dict.fromkeys(program.mesh_axes, "")
    for arg in (*program.inputs, *program.outputs):
        for dim in arg.spec.dims:
            for sharding in dim.shardings:
                if sharding.layout != "contiguous":
                    layouts[sharding.axis] = sharding.layout
    return layouts


def checked(program: Program, case: CaseSpec) -> str:
    """One sentence: where types clash, that they agree, or where they cannot be followed."""
    layouts = typed_axes(program)
    typed = tuple(axis for axis, layout in layouts.items() if not layout and case.mesh[axis] > 1)
    untyped = ", ".join(f"{axis} ({layout})" for axis, layout in layouts.items() if layout)
    tail = f"; not typed: {untyped}" if untyped else ""
    if not typed:
        return f"not typed: {untyped or 'a mesh of one rank'}"
    device_mesh = init_device_mesh("cpu", tuple(case.scheme_mesh.values()), mesh_dim_names=program.mesh_axes)
    mesh = TypedMesh(device_mesh, typed=typed)
    try:
        if program.setup is not None:
            program.prepare(mesh, case)
        call = ProgramCall(program, mesh, case.replace(conditions={}))
    except RAISED as error:
        return f"could not type it: {_first_line(error)}"
    file = program.fn.__code__.co_filename
    with ExitStack() as stack:
        stack.enter_context(program._surroundings(call.view))
        stack.enter_context(st.set_current_mesh(device_mesh[typed]))
        stack.enter_context(checker.typecheck("permissive", local=False))
        try:
            for arg in program.inputs:
                _assert_spec(call.leaves[arg.name], arg, mesh, program.module)
            outputs = _outputs(program, call)
            return (_clash_of_outputs(program, outputs, mesh) or AGREE) + tail
        except RAISED as error:
            return _sentence(error, file, mesh) + tail


def _outputs(program: Program, call: ProgramCall) -> dict[str, Any]:
    modified = [arg.name for arg in program.outputs if arg.modified]
    arguments = {name: leaf.clone() if name in modified else leaf for name, leaf in call.leaves.items()}
    returned = program.fn(call.view, **nested(arguments), **call.case.options)
    _, returned = program._module_of(returned)
    names = [arg.name for arg in program.outputs if not arg.modified]
    return outputs_by_name(returned, names, program.output_form)


def _assert_spec(tensor: torch.Tensor, arg: Argument, mesh: TypedMesh, module: str | None) -> None:
    """Give an input the types that its spec says.

    R stands for I where they do not differ yet: without a gradient, and for the parameters of a module, since its
    function runs the backward itself and makes their gradients equal afterwards.
    """
    is_parameter = module is not None and arg.name.startswith(f"{module}.")
    of_replicas = "I" if tensor.requires_grad and not is_parameter else "R"
    letters = {axis: arg.spec.type_of(axis) for axis in mesh.typed}
    types = {axis: rules.LETTERS[of_replicas if letter == "I" else letter] for axis, letter in letters.items()}
    _assert(tensor, types, _sharded_by(arg, mesh), mesh)


def _sharded_by(arg: Argument, mesh: TypedMesh) -> list[tuple[str, ...]]:
    """The typed axes that shard each dim, outermost first."""
    return [tuple(s.axis for s in dim.shardings if s.axis in mesh.typed) for dim in arg.spec.dims]


def _assert(tensor: torch.Tensor, types: Mapping[str, Any], sharded: list[tuple[str, ...]], mesh: MeshView) -> Any:
    group = mesh.device_mesh.get_group
    entries = [tuple(group(axis) for axis in axes) or None for axes in sharded]
    spec = st.PartitionSpec(*(each[0] if each and len(each) == 1 else each for each in entries))
    kept = {group(axis): letter for axis, letter in types.items()}
    return st.assert_type(tensor, kept, partition_spec=spec if any(entries) else None)


def _clash_of_outputs(program: Program, outputs: Mapping[str, Any], mesh: TypedMesh) -> str | None:
    """The first output with another type than its spec.

    Only the author can say that a shard is a term (P). A tensor of type R may be returned as a shard (V): each rank's
    cotangent is then a term of its gradient, which R allows.
    """
    for arg in program.outputs:
        tensor = outputs.get(arg.name)
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            continue
        for axis in mesh.typed:
            stated, found = arg.spec.type_of(axis), st.maybe_get_axis_local_type(tensor, mesh[axis])
            is_stated = found is rules.LETTERS[stated] or (found is rules.LETTERS["R"] and stated == "V")
            if found is not None and stated != "P" and not is_stated:
                return f"output {arg.name!r} is {axis}={_letter(found)}, its spec says {axis}={stated}"
    return None


def _letter(found: Any) -> str:
    return next(letter for letter, each in rules.LETTERS.items() if each is found)


def _sentence(error: BaseException, file: str, mesh: MeshView) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"line {frames[-1].lineno}" if frames else "it"
    clash = clash_of(error, mesh)
    return f"{where}: {clash}" if clash else f"could not type {where}: {_first_line(error)}"


def clash_of(error: BaseException, mesh: MeshView) -> str | None:
    """The words for two types that do not go together; None for an error that says nothing of the code's types."""
    if not isinstance(error, st.SpmdTypeError):
        return None
    text, context = str(error), getattr(error, "context", None) or ""
    called = re.search(r"In ([\w.]+)\(", context)
    names = {format_axis(mesh[axis]): axis for axis in mesh.axes}
    for pattern, words in CLASHES.items():
        if (match := re.search(pattern, text)) and (called is None or called[1] not in NO_CLASH):
            return words.format(axis=names.get(match[1], match[1]), call=called[1] if called else "it")
    if match := OF_A_RULE.search(text):
        return f"{match[1]} over {names.get(match[3], match[3])} of a value of type {match[4]}, it takes {match[2]}"
    return None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> None:
    """Read a program and its case from standard input, and write the sentence of `checked`."""
    program, case = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout, sys.stderr  # the function may print; the answer is ours alone
    dist.init_process_group("fake", rank=0, world_size=case.world)
    rules.register()
    sentence = checked(pickle.loads(program), case)
    out.write(json.dumps(sentence))
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
