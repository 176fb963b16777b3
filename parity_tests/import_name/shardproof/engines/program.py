"""Program: the part of a scheme that is sent to the ranks: shapes, specs and the function, without JAX.

Calling a program on a rank builds that rank's shards from the case, runs the function forward and backward under the
case's calling conditions, and returns plain NumPy arrays with the findings of the hygiene oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from shardproof.declare import conditions
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared, nested, outputs_by_name
from shardproof.declare.draws import Draw
from shardproof.declare.spec import Sharding
from shardproof.declare.travel import without_annotations
from shardproof.draw import inputs
from shardproof.endings.raised import RAISED, message_of
from shardproof.engines import calling, modules, returned_tensors, second_derivative
from shardproof.engines.failure import RankFailure, RankFault
from shardproof.engines.ledger import at_users_line
from torch_impl.collectives.mesh import MeshView


@dataclass(frozen=True)
class RankResult:
    """The result of one rank: outputs and gradients by name, and the sentences of the hygiene oracle.

    `second` has its terms of the second derivative, if the case asks for that and the function has one.
    """

    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray | None]
    dtypes: dict[str, str]
    hygiene: tuple[str, ...] = ()
    second: second_derivative.SecondDerivative | None = None


@dataclass(frozen=True)
class Program:
    """Function, arguments and layouts of a scheme, without its reference."""

    name: str
    fn: Callable[..., Any]
    mesh_axes: tuple[str, ...]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    output_form: str  # one | tuple | dict
    draws: Mapping[str, Draw] = field(default_factory=dict)
    layouts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    random: bool = False
    setup: Callable[[Any], Any] | None = None
    around: Callable[[Any], AbstractContextManager[Any]] | None = None
    isolate: tuple[str, ...] = ()
    module: str | None = None
    arrays: Mapping[str, np.ndarray] | None = None  # full inputs in place of the drawn ones
    cotangents: Mapping[str, np.ndarray] | None = None
    nan_cotangents: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        scheme: Declared,
        arrays: Mapping[str, np.ndarray] | None = None,
        cotangents: Mapping[str, np.ndarray] | None = None,
    ) -> Program:
        """The part of a scheme that is sent to the ranks; `arrays` and `cotangents` replace the drawn ones."""
        return cls(
            scheme.name,
            without_annotations(scheme.fn),
            tuple(scheme.mesh),
            scheme.inputs,
            scheme.outputs,
            scheme.output_form,
            scheme.draws,
            scheme.layouts,
            scheme.random,
            scheme.setup,
            scheme.around,
            scheme.isolate,
            scheme.module,
            arrays,
            cotangents,
            scheme.nan_cotangents,
        )

    @property
    def setup_key(self) -> tuple[str, Callable[[Any], Any]] | None:
        """After `setup`, ranks run only programs with the same key. None without `setup`: any ranks run the program."""
        return None if self.setup is None else (self.name, self.setup)

    def prepare(self, mesh: Any, case: CaseSpec) -> None:
        """Run `setup` on this rank. The engine calls it once per mesh, before the first case."""
        assert self.setup is not None
        try:
            self.setup(self._scheme_mesh(mesh))
        except RAISED as error:
            if isinstance(error, RankFailure):
                raise
            who = f"scheme '{self.name}': setup of rank {torch.distributed.get_rank()}"
            raise RankFault(
                f"{who} raised {type(error).__name__}: {message_of(error)}{at_users_line(error)}"
            ) from error

    def __call__(self, mesh: Any, case: CaseSpec) -> RankResult:
        earlier, between = conditions.other_case(case, "call_before"), conditions.other_case(case, "call_between")
        generator = torch.get_rng_state()
        if earlier is not None:
            self._complete_call(mesh, earlier, is_overwritten=bool(case.conditions.get("overwritten")))
        call = ProgramCall(self, mesh, case)
        with self._surroundings(call.view):
            outputs = {name: tensor.detach().clone() for name, tensor in call.forward().items()}
            finish = None if between is None else self._begun_call(mesh, between)
            sentences = _modified("output", outputs, call.outputs, "by the next call")
            before = {name: tensor.detach().clone() for name, tensor in call.outputs.items()}
            gradients = call.backward()
            sentences += _modified("output", before, call.outputs, "by the backward")
            if finish is not None:
                finish()
            second = self._second_derivative(mesh, case) if case.conditions.get("second_derivative") else None
        sentences += call.hygiene()
        draws = self.random or self.module is not None  # a module draws its initial weights
        if not draws and not torch.equal(generator, torch.get_rng_state()):
            sentences.append("the random state moved; declare random=True if the scheme draws")
        return RankResult(
            {name: to_numpy(tensor) for name, tensor in outputs.items()},
            {name: None if g is None else to_numpy(g) for name, g in gradients.items()},
            {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in outputs.items()},
            tuple(sentences),
            second,
        )

    def _second_derivative(self, mesh: Any, case: CaseSpec) -> second_derivative.SecondDerivative | None:
        """This rank's terms of it, by a call of its own."""
        call = ProgramCall(self, mesh, case)
        call.forward()
        variables, outputs = call.differentiated()
        if not variables or not outputs:
            return None
        directions = {
            arg.name: self._direction(arg, case, call.coords, variables[arg.name])
            for arg in self.inputs
            if arg.name in variables
        }
        shares = [second_derivative.shares(each, case.mesh) for each in (self.inputs, self.outputs)]
        return second_derivative.terms(outputs, variables, call.drawn_cotangents(outputs), directions, shares)

    def _complete_call(self, mesh: Any, case: CaseSpec, *, is_overwritten: bool) -> None:
        """A call without a comparison: it must only not raise. Its caller may overwrite all its tensors."""
        call = ProgramCall(self._without_arrays(), mesh, case)
        with self._surroundings(call.view):
            call.forward()
            gradients = call.finish()
        if is_overwritten:
            calling.overwrite([*call.leaves.values(), *call.outputs.values(), *call.cotangents.values(), *gradients])

    def _begun_call(self, mesh: Any, case: CaseSpec) -> Callable[[], Any]:
        """The forward of an uncompared call; returns its backward, which waits for all pending work."""
        call = ProgramCall(self._without_arrays(), mesh, case)
        call.forward()
        return call.finish

    def _without_arrays(self) -> Program:
        """The program for a case other than the one that `arrays` belong to."""
        return replace(self, arrays=None, cotangents=None)

    def full_array(self, arg: Argument, case: CaseSpec) -> np.ndarray:
        """An input as the user gave it or as drawn; read-only."""
        if self.arrays:
            return self.arrays[arg.name]
        draw = self.draws[arg.name]
        return inputs.once_for_case(case, ("input", arg.name), draw, partial(inputs.full_array, arg, draw, case))

    def full_cotangent(self, arg: Argument, case: CaseSpec) -> np.ndarray:
        """The cotangent of an output, given or drawn; read-only."""
        if self.cotangents and arg.name in self.cotangents:
            return self.cotangents[arg.name]
        build = partial(inputs.cotangent, arg, case, self.nan_cotangents.get(arg.name))
        return inputs.once_for_case(case, ("cotangent", arg.name), arg, build)

    def addends(self, arg: Argument, case: CaseSpec, role: str) -> np.ndarray:
        """The addends of an input or a cotangent, one for each rank of the axes that it is summed over."""
        full = (self.full_array if role == "input" else self.full_cotangent)(arg, case)
        return inputs.once_for_case(
            case, (role, "addends", arg.name), full, lambda: inputs.addends(arg, full, case, role)
        )

    def _bind(self, mesh: Any, case: CaseSpec) -> Any:
        """The mesh as the scheme sees it: its own axes, and the global ids of this example's dims."""
        shardings = {}
        for arg in (*self.inputs, *self.outputs):
            for dim in arg.spec.dims:
                if dim.shardings and dim.name not in shardings:
                    pairs = [
                        (sharding.axis, self._production_layout(case, dim.name, sharding)) for sharding in dim.shardings
                    ]
                    shardings[dim.name] = (dim.size(case.dims), pairs)
        return self._scheme_mesh(mesh).bind(shardings)

    def _scheme_mesh(self, mesh: Any) -> Any:
        return mesh if mesh.axes == self.mesh_axes else MeshView(mesh.device_mesh[self.mesh_axes])  # inside a subgroup

    def _surroundings(self, view: Any) -> AbstractContextManager[Any]:
        """The context manager that `around` returns for this rank. Errors: RankFault for any other object."""
        if self.around is None:
            return nullcontext()
        manager = self.around(view)
        if not hasattr(manager, "__enter__"):
            raise RankFault(f"scheme '{self.name}': around returned {type(manager).__name__}; return a context manager")
        return manager

    def _production_layout(self, case: CaseSpec, dim: str, sharding: Sharding) -> Callable[[int, int], Any]:
        lengths = inputs.shard_lengths(case, dim, sharding)
        return inputs.layout_function(sharding.layout, lengths, self.layouts, trusted=False)

    def _leaf(self, arg: Argument, case: CaseSpec, coords: Mapping[str, int], device: str) -> torch.Tensor:
        if arg.is_integer:
            full = calling.of_integer_dtype(self.full_array(arg, case), arg.name, case)
            local = inputs.piece(arg, full, case, coords, self.layouts)
            return calling.stored(torch.from_numpy(local.copy()).to(device), arg.name, case)
        addend = inputs.addend_of_rank(arg, self.addends(arg, case, "input"), case, coords, role="input")
        local = inputs.piece(arg, addend, case, coords, self.layouts)
        dtype = getattr(torch, conditions.dtype_of(case, arg.name))
        leaf = calling.stored(torch.from_numpy(local.copy()).to(device, dtype), arg.name, case)
        return leaf.requires_grad_(arg.differentiable and arg.name not in case.conditions.get("frozen", ()))

    def _cotangent(self, arg: Argument, case: CaseSpec, coords: Mapping[str, int], like: torch.Tensor) -> torch.Tensor:
        """A cotangent with the dtype and on the device of the output."""
        addend = inputs.addend_of_rank(arg, self.addends(arg, case, "cotangent"), case, coords, role="cotangent")
        local = inputs.piece(arg, addend, case, coords, self.layouts)
        return calling.stored(torch.from_numpy(local.copy()).to(like), conditions.COTANGENT + arg.name, case)

    def _direction(self, arg: Argument, case: CaseSpec, coords: Mapping[str, int], like: torch.Tensor) -> torch.Tensor:
        """A random direction of an input, sharded and split into addends as the input is."""
        addends = inputs.addends(arg, inputs.direction(arg, case), case, "input")
        addend = inputs.addend_of_rank(arg, addends, case, coords, role="input")
        return torch.from_numpy(inputs.piece(arg, addend, case, coords, self.layouts).copy()).to(like)

    def _module_of(self, returned: Any) -> tuple[torch.nn.Module | None, Any]:
        """The module with the gradients, and the outputs before it; None if the harness runs the backward itself."""
        if self.module is None:
            return None, returned
        who = f"scheme '{self.name}': rank {torch.distributed.get_rank()}"
        if not isinstance(returned, tuple | list) or len(returned) < 2 or not isinstance(returned[-1], torch.nn.Module):
            raise RankFault(f"{who} must return its outputs and then the module: return loss, model")
        expected_names = [arg.name.partition(".")[2] for arg in self.inputs if arg.name.startswith(f"{self.module}.")]
        parameter_names = [name for name, _ in modules.named_parameters(returned[-1])]
        if sorted(parameter_names) != sorted(expected_names):
            raise RankFault(
                f"{who}: the module has ({', '.join(parameter_names)}), {self.module} has ({', '.join(expected_names)})"
            )
        outputs = returned[:-1]
        return returned[-1], outputs[0] if len(outputs) == 1 else outputs

    def _checked_outputs(
        self, returned: Any, case: CaseSpec, view: Any, coords: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, after checks of their number, type and local shape."""
        rank = int(torch.distributed.get_rank())
        outputs = [arg for arg in self.outputs if not arg.modified]
        try:
            parts = outputs_by_name(returned, [arg.name for arg in outputs], self.output_form)
        except ValueError as error:
            raise RankFault(f"scheme '{self.name}': rank {rank} {error}") from None
        return {arg.name: self._checked(arg, parts[arg.name], case, coords, rank) for arg in outputs}

    def _checked(self, arg: Argument, part: Any, case: CaseSpec, coords: Mapping[str, int], rank: int) -> torch.Tensor:
        if not isinstance(part, torch.Tensor):
            raise RankFault(
                f"scheme '{self.name}': rank {rank} returned {type(part).__name__} for '{arg.name}'; return a tensor"
            )
        if hasattr(part, "placements"):
            who = f"scheme '{self.name}': rank {rank}"
            returned_tensors.check_placements(part, arg, self.mesh_axes, who)
        if hasattr(part, "to_local"):
            part = part.to_local()  # pyright: ignore[reportAttributeAccessIssue]
        if part.layout != torch.strided or part.is_meta:
            what = "on meta" if part.is_meta else f"of layout {part.layout}"
            raise RankFault(
                f"scheme '{self.name}': rank {rank} returned a tensor {what} for '{arg.name}'; return a dense one"
            )
        returned_tensors.check_storage(part, f"scheme '{self.name}': rank {rank} returned '{arg.name}'")
        want = inputs.local_shape(arg, case, coords, self.layouts)
        if tuple(part.shape) != want:
            raise RankFault(
                f"scheme '{self.name}': rank {rank} returned {tuple(part.shape)}, "
                f"'{arg.spec}'{_sizes(arg, case)} says {want}"
            )
        if part.is_complex() or part.is_floating_point() == arg.is_integer:
            kind = "Float" if arg.is_integer else "Int or Bool of jaxtyping"
            remedy = (
                "return its torch.view_as_real" if part.is_complex() else f"annotate the return as {kind} if it is one"
            )
            raise RankFault(f"scheme '{self.name}': rank {rank} returned {part.dtype} for '{arg.name}'; {remedy}")
        return part


class ProgramCall:
    """One call of a program on a rank: its tensors as the case stores them, its forward and its backward."""

    def __init__(self, program: Program, mesh: Any, case: CaseSpec) -> None:
        self.program, self.case = program, case
        self.view = program._bind(mesh, case)
        self.coords = {axis: self.view.rank(axis) for axis in program.mesh_axes}
        device = self.view.device_mesh.device_type
        each = {arg.name: program._leaf(arg, case, self.coords, device) for arg in program.inputs}
        self.leaves = calling.in_one_storage(each, case)
        # A function may turn the gradient of an input off, which is then missing and not left out.
        self.variables = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        self.leaves_before = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        self.module: torch.nn.Module | None = None
        self.outputs: dict[str, torch.Tensor] = {}
        self.cotangents: dict[str, torch.Tensor] = {}
        self.cotangents_before: dict[str, torch.Tensor] = {}

    def forward(self) -> dict[str, torch.Tensor]:
        modified = [arg.name for arg in self.program.outputs if arg.modified]
        arguments = {name: leaf.clone() if name in modified else leaf for name, leaf in self.leaves.items()}
        with calling.grad_mode(self.case), calling.autocast(self.case, self.view.device_mesh.device_type):
            function = partial(self.program.fn, self.view, **nested(arguments), **self.case.options)
            returned = calling.called(function, self.case)
            self.module, returned = self.program._module_of(returned)
            self.outputs = self.program._checked_outputs(returned, self.case, self.view, self.coords)
        self.outputs |= {name: arguments[name].detach().clone() for name in modified}
        return self.outputs

    def backward(self) -> dict[str, torch.Tensor | None]:
        """The gradient of each input that requires one; None if no output depends on it."""
        if self.module is not None:
            return modules.gradients(self.module, self.program.module or "", self.variables)
        variables, outputs = self.differentiated()
        self.cotangents = self.drawn_cotangents(outputs)
        self.cotangents_before = {name: cotangent.clone() for name, cotangent in self.cotangents.items()}
        # An input that the function returns unchanged requires grad even under no_grad.
        if not variables or not outputs or set(conditions.WITHOUT_GRADIENTS) & set(self.case.conditions):
            return dict.fromkeys(self.variables)
        both = list(outputs.values()), list(variables.values())
        results = calling.gradients(*both, list(self.cotangents.values()), self.case)
        return dict.fromkeys(self.variables) | dict(zip(variables, results, strict=True))

    def differentiated(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Inputs that still require a gradient, and outputs that have a cotangent."""
        unused = self.case.conditions.get("unused", ())
        names = [arg.name for arg in self.program.outputs if arg.differentiable and arg.name not in unused]
        outputs = {name: self.outputs[name] for name in names if self.outputs[name].requires_grad}
        return {name: leaf for name, leaf in self.variables.items() if leaf.requires_grad}, outputs

    def drawn_cotangents(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            arg.name: self.program._cotangent(arg, self.case, self.coords, outputs[arg.name])
            for arg in self.program.outputs
            if arg.name in outputs
        }

    def finish(self) -> list[torch.Tensor]:
        """The gradients of a call without a comparison; like any caller, it waits for all results."""
        calling.wait_for(self.outputs.values())
        gradients = self.backward().values()
        calling.wait_for(gradients)
        return [gradient for gradient in gradients if gradient is not None]

    def hygiene(self) -> list[str]:
        """Sentences on tensors that the function has modified or shares with its caller."""
        return [
            *_modified("input", self.leaves_before, self.leaves),
            *_modified("cotangent", self.cotangents_before, self.cotangents),
            *self._accumulated(),
            *calling.shared_with_inputs(self.outputs, self.leaves, self.case),
        ]

    def _accumulated(self) -> list[str]:
        """A sentence on each input that the function has left a gradient in: a caller's backward would add to it.

        The function of a scheme with `module=` is the caller itself.
        """
        variables = {} if self.module is not None else self.variables
        return [
            f"input '{name}' was left with a gradient of its own in .grad, to which a caller's backward() adds"
            for name, variable in variables.items()
            if variable.grad is not None
        ]


def _sizes(arg: Argument, case: CaseSpec) -> str:
    """` with s=8, cp=4`: the sizes that determine a local shape."""
    named_dims = [dim for dim in arg.spec.dims if not dim.name.isdigit()]
    sharding = {dim.name: dim.size(case.dims) for dim in named_dims if dim.shardings}
    sizes = {dim.name: dim.size(case.dims) for dim in named_dims}
    sizes_shown = {**(sharding or sizes), **{axis: case.mesh[axis] for axis in arg.spec.axes}}
    return f" with {', '.join(f'{name}={size}' for name, size in sizes_shown.items())}" if sizes_shown else ""


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """float64 copy of a floating tensor (exact), plain copy of any other."""
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).contiguous().numpy().copy()


def _modified(
    role: str, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], by: str = ""
) -> list[str]:
    sentences = []
    for name, old in before.items():
        new = after[name].detach()
        different = new != old
        if new.is_floating_point():  # bit by bit, except that any NaN equals any other
            different = (different & ~(new.isnan() & old.isnan())) | (new.signbit() != old.signbit())
        if bool(different.any()):
            first = tuple(int(i) for i in different.nonzero()[0])
            sentences.append(f"{role} '{name}' was modified {by}".rstrip() + f", first at {first}")
    return sentences
