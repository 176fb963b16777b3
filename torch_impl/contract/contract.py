"""Read a signature once, when its function is defined; validate the arguments of every call."""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, overload

from torch_impl.contract.kinds import BUILTIN, Kind, OneOf, RelatedKind, Sizes
from torch_impl.contract.rejected import Rejected, of_argument, rejection

P = ParamSpec("P")

_OF_CLASS = ("__init__", "__post_init__", "__call__", "forward")  # methods that messages name by their class
R = TypeVar("R")


@dataclass(frozen=True)
class Argument:
    """An argument that a contract validates. A value of one of `other_types`, as a DTensor, needs no validation."""

    name: str
    position: int  # of a keyword-only argument: beyond all positional ones
    kind: Any  # a Kind or a RelatedKind
    is_related: bool
    is_required: bool  # has no default
    takes_none: bool
    other_types: tuple[Any, ...]


@dataclass(frozen=True)
class Contract:
    """What a signature says: the name that begins every message, the arguments, the specs of the results.

    `inputs` maps each tensor argument to its spec string; `outputs` has one tuple of specs for each form of the
    result, since an option may add one.
    """

    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[tuple[str, ...], ...]

    @property
    def inputs(self) -> dict[str, str]:
        """The spec string of each tensor argument."""
        specs = {each.name: _spec(each.kind) for each in self.arguments}
        return {name: spec for name, spec in specs.items() if spec is not None}

    @property
    def routes(self) -> dict[str, tuple[str, ...]]:
        """The spec strings of each tensor argument, one for each route; of most there is one."""
        return {name: (spec, *self._kinds[name].other_specs) for name, spec in self.inputs.items()}

    @property
    def axes(self) -> set[str]:
        """The axes that the specs name: of shardings and of gradient types."""
        specs = [spec for group in (*self.routes.values(), *self.outputs) for spec in group]
        words = [word for spec in specs for word in spec.split()]
        shardings = {each.partition(":")[0] for word in words for each in word.split("/")[1:]}
        return shardings | {word.partition("=")[0] for word in words if "=" in word}

    @property
    def required(self) -> tuple[str, ...]:
        """The arguments that a contract validates and that a call must pass, not even None."""
        return tuple(each.name for each in self.arguments if each.is_required and not each.takes_none)

    @property
    def _kinds(self) -> dict[str, Any]:
        return {each.name: each.kind for each in self.arguments}

    def validate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Validate the `args` and `kwargs` of a call, in the order of the signature. Errors: Rejected."""
        sizes: Sizes = {}
        # By position or name, without `Signature.bind`, which costs more than the validation.
        for each in self.arguments:
            if each.position < len(args):
                value = args[each.position]
            elif each.name in kwargs:
                value = kwargs[each.name]
            else:  # a default, or an argument that Python itself will miss
                continue
            if value is None and each.takes_none:
                continue
            if each.other_types and _is_one_of(value, each.other_types):
                continue
            if each.is_related:
                if (sentence := each.kind.problem_beside(each.name, value, sizes)) is not None:
                    raise rejection(sentence)
            elif (problem := each.kind.problem(value)) is not None:
                raise rejection(of_argument(each.name, problem))


@overload
def contract(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def contract(function: str, /) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def contract(function: Callable[P, R] | str, /) -> Any:
    """Execute the contract that a signature states, once for each call of the function.

    `@contract` begins messages with the component and the name of the function or class; `@contract("layouts.shard")`
    names another beginning. On an autograd Function it decorates `forward`, below `@staticmethod`.

    Cost:   about a microsecond an argument in eager; nothing in a compiled graph.
    Errors: of the decorated function: TypeError for an argument of another type, ValueError for another value, and
            each `Rejected` that its body raises, with the function's name before the sentence.
    """
    if isinstance(function, str):
        return lambda body: _with_contract(body, function)
    return _with_contract(function, _default_name(function))


def contract_of(public: Any) -> Contract | None:
    """The contract of a function, of an autograd Function or of a class's constructor; None if it states none."""
    # A function states its contract itself, an autograd Function on `forward`, a class on its constructor.
    for name in (None, "forward", "__init__", "__post_init__"):
        stated = getattr(public if name is None else getattr(public, name, None), "__contract__", None)
        if stated is not None:
            return stated
    return None


def read_contract(function: Callable[..., Any]) -> Contract:
    """What the annotations of a function state, whether or not `@contract` executes it.

    Errors: those of an annotation that cannot be evaluated.
    """
    return _read(function, _default_name(function))


def spec_line(public: Any) -> str:
    """The specs of a public function in one line, as the manual prints them; empty without a contract."""
    stated = contract_of(public)
    if stated is None or not (stated.inputs or stated.outputs):
        return ""
    routes = {name: " or ".join(f'"{spec}"' for spec in specs) for name, specs in stated.routes.items()}
    inputs = "   ".join(f"{name} {specs}" for name, specs in routes.items())
    outputs = "  or  ".join(", ".join(f'"{spec}"' for spec in form) for form in stated.outputs)
    return f"{inputs}   ->   {outputs}" if outputs else inputs


def _with_contract(function: Callable[P, R], name: str) -> Callable[P, R]:
    stated = _read(function, name)

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            stated.validate(args, kwargs)
            return function(*args, **kwargs)
        except Rejected as rejected:
            raise rejected.named(stated.function) from rejected.__cause__

    entry.__contract__ = stated  # pyright: ignore[reportAttributeAccessIssue]
    return entry


def _default_name(function: Callable[..., Any]) -> str:
    # torch_impl.<component>.<file>: the file is not part of the name that messages begin with.
    component = function.__module__.split(".")[1] if "." in function.__module__ else function.__module__
    qualified = function.__qualname__.rpartition("<locals>.")[2]
    # Of a class's constructor, and of what runs when its objects are called, the class.
    owner, _, method = qualified.rpartition(".")
    return f"{component}.{owner if owner and method in _OF_CLASS else qualified}"


def _read(function: Callable[..., Any], name: str) -> Contract:
    signature = inspect.signature(function)
    defined = inspect.unwrap(function)  # another decorator's wrapper has the globals of the decorator's module
    arguments = []
    for position, parameter in enumerate(signature.parameters.values()):
        # `*args` and `**kwargs` have no one value that a kind could validate.
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        kind, takes_none, other_types = _kind_of(_meaning(parameter.annotation, defined))
        if kind is not None:
            # Beyond every positional argument of a call, so that it is looked up by name.
            place = len(signature.parameters) if keyword_only else position
            is_related = isinstance(kind, RelatedKind)
            is_required = parameter.default is parameter.empty
            arguments.append(Argument(parameter.name, place, kind, is_related, is_required, takes_none, other_types))
    return Contract(name, tuple(arguments), tuple(_outputs(_meaning(signature.return_annotation, defined))))


def _kind_of(annotation: Any) -> tuple[Kind | RelatedKind | None, bool, tuple[Any, ...]]:
    """The kind of an annotation, whether None is one of its values, and the other types that it takes."""
    members = list(_members(annotation))
    takes_none = any(member in (None, NoneType) for member in members)
    kinds = [kind for kind in map(_kind_of_member, members) if kind is not None]
    types = tuple(member for member in members if member not in (None, NoneType) and _kind_of_member(member) is None)
    # Any accepts everything, and of two kinds neither decides: such a union is not validated.
    if len(kinds) != 1 or any(member is Any for member in types):
        return None, takes_none, ()
    return kinds[0], takes_none, types


def _kind_of_member(member: Any) -> Kind | RelatedKind | None:
    if get_origin(member) is Annotated:
        return next((extra for extra in member.__metadata__ if isinstance(extra, (Kind, RelatedKind))), None)
    if get_origin(member) is Literal:
        return OneOf(get_args(member))
    return BUILTIN.get(member) if isinstance(member, type) else None


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _outputs(annotation: Any) -> Iterator[tuple[str, ...]]:
    """The specs of each form of the result."""
    # Each member of a union is one form of the result; each member of a tuple is one of its tensors.
    for form in _members(annotation):
        parts = get_args(form) if get_origin(form) is tuple else (form,)
        kinds = [_kind_of(part)[0] for part in parts]  # of a tensor or None, the tensor's
        specs = tuple(spec for spec in map(_spec, kinds) if spec is not None)
        if specs:
            yield specs


def _spec(kind: Any) -> str | None:
    """The spec string of a tensor's kind; None for what is no tensor."""
    return getattr(kind, "spec", None)


def _is_one_of(value: Any, types: tuple[Any, ...]) -> bool:
    """Whether a value is of one of the types; a type that was not imported is compared by its name."""
    for each in types:
        if isinstance(each, _Unresolved):
            name = each.name.rpartition(".")[2]
            for base in type(value).__mro__:
                if base.__name__ == name:
                    return True
        elif isinstance(value, get_origin(each) or each):
            return True
    return False


@dataclass(frozen=True)
class _Unresolved:
    """A name of an annotation that its module does not import when it runs, as under `if TYPE_CHECKING`."""

    name: str

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # pyright: ignore[reportInvalidTypeForm] # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # pyright: ignore[reportInvalidTypeForm] # noqa: UP007

    def __getitem__(self, item: Any) -> _Unresolved:
        return self

    def __getattr__(self, name: str) -> _Unresolved:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unresolved(f"{self.name}.{name}")

    def __call__(self) -> None:
        """Callable, since `typing` takes nothing else for a type."""


def _meaning(annotation: Any, function: Callable[..., Any]) -> Any:
    """The object that an annotation means, written as a string or not."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    # A name that only a type checker imports becomes a placeholder, so that the rest of the annotation still counts.
    code = compile(annotation, f"<annotation of {function.__qualname__}>", "eval")
    namespace = {**vars(builtins), **function.__globals__, **_nonlocals(function)}
    return eval(code, {name: namespace.get(name, _Unresolved(name)) for name in code.co_names})


def _nonlocals(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over; the class of a method that says `super()` does not exist yet."""
    nonlocals = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            nonlocals[name] = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    return nonlocals
