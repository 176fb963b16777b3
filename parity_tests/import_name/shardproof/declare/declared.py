"""A validated and complete declaration: tensors by name and spec, costs, and the scheme itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardproof.declare.case import CaseSpec, SizesAndOptions
from shardproof.declare.dim_formulas import names_in
from shardproof.declare.draws import Draw
from shardproof.declare.spec import Spec


@dataclass(frozen=True)
class Argument:
    """One tensor of a scheme: an input by its path (`params.weight`), an output, or a modified input's new value."""

    name: str
    spec: Spec
    is_integer: bool = False
    nograd: bool = False
    modified: bool = False  # not a returned tensor, but the new value of a modified input

    @property
    def differentiable(self) -> bool:
        return not (self.is_integer or self.nograd)

    def shape(self, case: CaseSpec) -> tuple[int, ...]:
        return tuple(dim.size(case.dims) for dim in self.spec.dims)


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """`{"norm": {"weight": x}}` as `{"norm.weight": x}`."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`{"norm.weight": x}` as `{"norm": {"weight": x}}`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split(".")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[name] = leaf
    return tree


def outputs_by_name(returned: Any, names: Sequence[str], output_form: str) -> dict[str, Any]:
    """The result of a function or its reference as a dict, in the order of the outputs.

    Errors: ValueError for wrong names or a wrong number of outputs; the caller prefixes it with the function.
    """
    if output_form == "dict":
        if not isinstance(returned, dict) or sorted(returned) != sorted(names):
            keys = sorted(returned) if isinstance(returned, dict) else type(returned).__name__
            raise ValueError(f"returned {keys}, outputs has {sorted(names)}")
        return {name: returned[name] for name in names}
    parts = list(returned) if isinstance(returned, tuple | list) else [returned]
    if len(parts) != len(names):
        raise ValueError(f"returned {len(parts)} outputs, outputs has {len(names)}")
    return dict(zip(names, parts, strict=True))


def takes_mesh(reference: Callable[..., Any]) -> bool:
    """Whether a reference takes an argument `mesh`, the sizes of the mesh's axes."""
    try:
        return "mesh" in inspect.signature(reference).parameters
    except ValueError:  # a compiled callable may have no signature
        return False


@dataclass(frozen=True)
class Cost:
    """Declared cost of a rank: per phase, op or op/axis -> (calls, bytes).

    `"all_gather/tp"` also names the axis. On a mesh of several axes only such costs can be assigned to links.
    `products` counts the floating-point operations of one rank's matrix products, forward and backward, with a
    multiply-add as two; the ledger has no such count to compare.
    """

    forward: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    backward: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    products: tuple[int, int] | None = None

    def totals(self, phase: str) -> dict[str, tuple[int, int]]:
        """{op: (calls, bytes)} of a phase, summed over axes."""
        sums: dict[str, tuple[int, int]] = {}
        for (op, _), (calls, size) in self.by_axis(phase).items():
            before = sums.get(op, (0, 0))
            sums[op] = (before[0] + calls, before[1] + size)
        return sums

    def by_axis(self, phase: str) -> dict[tuple[str, str | None], tuple[int, int]]:
        """{(op, axis): (calls, bytes)} of a phase; the axis is None if not declared."""
        promised: Mapping[str, tuple[int, int]] = getattr(self, phase)
        return {(key.partition("/")[0], key.partition("/")[2] or None): value for key, value in promised.items()}


@dataclass(frozen=True)
class Implementation:
    """An implementation that is judged in place of ours: the functions of `target`, a module name or a file.

    `judged` names these functions and their places, `ours` the functions of ours that the scheme also calls.
    """

    target: str
    judged: tuple[str, ...]
    ours: tuple[str, ...] = ()
    lacks_parameters: bool = False  # it lacks some that our functions have
    not_applicable: str | None = None  # the missing parameters, and the options that are therefore not tried

    @property
    def lines(self) -> list[str]:
        """Lines on the implementation in a report."""
        ours = f"; ours: {', '.join(self.ours)}" if self.ours else ""
        lines = [f"judged: {', '.join(self.judged)}{ours}"]
        return lines + ([f"not applicable: {self.not_applicable}"] if self.not_applicable else [])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"judged": list(self.judged), "ours": list(self.ours), "not_applicable": self.not_applicable}


@dataclass(frozen=True, eq=False)
class Declared:
    """A per-rank function with its reference, its arguments and the values to try."""

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    mesh: Mapping[str, tuple[int, ...]]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    output_form: str
    draws: Mapping[str, Draw]
    dims: Mapping[str, tuple[int, ...] | str]
    layouts: Mapping[str, Callable[..., Any]]
    options: Mapping[str, tuple[Any, ...]]
    rank_options: Mapping[str, tuple[Any, ...]]
    dtypes: tuple[str, ...]
    reduction: tuple[str, ...] | None
    roundings: int
    cost: Callable[..., Cost | Sequence[Cost]] | None
    engines: tuple[str, ...]
    replicas: str
    random: bool
    file: str
    line: int
    declared_by: str | None  # the module that declares it at import; None if a function declares it later
    setup: Callable[[Any], Any] | None = None  # `setup(mesh)`, called once per rank and mesh
    around: Callable[[Any], AbstractContextManager[Any]] | None = None  # `around(mesh)`, for forward and backward
    module: str | None = None  # the input tree that holds the parameters of the returned module
    assume: Callable[[SizesAndOptions], Any] | None = None  # `assume(case)`: whether these sizes are drawn
    excluded_conditions: tuple[str, ...] = ()  # calling conditions that the function does not support
    sums: str | None = None  # "float32": only inputs and results are rounded to a narrower tested dtype
    wide: tuple[str, ...] | None = None  # outputs in float32 or wider, the others in the tested dtype; None: unchecked
    wider_inputs: tuple[str, ...] = ()  # inputs that may be float32 where the tested dtype has 16 bits
    ties: str | None = None  # "ordered": which of equal inputs comes first is promised
    inside: str | None = None  # the dtype of intermediates, if narrower than the tested one
    nan_cotangents: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by output: which rows are not read
    isolate: tuple[str, ...] = ()  # further modules with separate globals for each rank of lockstep
    implementation: Implementation | None = None  # tested in place of torch_impl, see shardproof/implementation

    @property
    def all_options(self) -> dict[str, tuple[Any, ...]]:
        """The keywords of both sides and of the ranks only, each with the values to try."""
        return {**self.options, **self.rank_options}

    def remedy_of_sizes(self, arg: Argument, got: tuple[int, ...], want: tuple[int, ...]) -> str:
        """Advice to declare the dims that no input has: their sizes are drawn, although the function sets them."""
        named = {dim.name for each in self.inputs for dim in each.spec.dims} | set(self.dims)
        dims = zip(arg.spec.dims, got, want, strict=True) if len(got) == len(want) else ()
        sizes = {dim.name: size for dim, size, other in dims if size != other and dim.name not in named}
        declared = ", ".join(f"'{name}': ({size},)" for name, size in sizes.items())
        names = ", ".join(map(str, sizes))
        return f"; no input has {names}: declare dims={{{declared}}} or a formula of other dims" if sizes else ""

    @cached_property
    def depends_on_mesh(self) -> bool:
        """Whether the size of a dim depends on an axis, as in dims={"e": "2*ep"}."""
        rules = [rule for rule in self.dims.values() if isinstance(rule, str)]
        return any(name in self.mesh for rule in rules for name in names_in(rule))

    @property
    def key(self) -> str:
        """`module:name`, the scheme's name in a CaseSpec."""
        return f"{self.fn.__module__}:{self.name}"
