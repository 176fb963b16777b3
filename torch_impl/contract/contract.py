"""Read a signature once, when its function is defined; validate the arguments of every call."""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, overload

from torch_impl.contract.kinds import BUILTIN, DEVICE, GRADIENT, INFERENCE, Instance, Kind, OneOf, RelatedKind, Sizes
from torch_impl.contract.rejected import Rejected, rejection, sentence_about

P = ParamSpec("P")

_OF_CLASS = ("__init__", "__post_init__", "__call__", "forward")  # methods that messages name by their class
R = TypeVar("R")


@dataclass(frozen=True)
class Argument:
    """An argument that a contract validates. A value of one of `other_types`, such as DTensor, is not validated."""

    name: str
    position: int  # a keyword-only argument has a position beyond all positional ones
    kind: Any  # a Kind or a RelatedKind
    is_related: bool
    is_required: bool  # has no default
    takes_none: bool
    other_types: tuple[Any, ...]


@dataclass(frozen=True)
class Contract:
    """The contents of a signature: the name that begins every message, the arguments, the specs of the results.

    `inputs` maps each tensor argument to its spec string; `outputs` has one tuple of specs for each form of the
    result, since an option may add a tensor.
    """

    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[tuple[str, ...], ...]

    @functools.cached_property
    def communicates(self) -> bool:
        """Whether a call is given a process group."""
        return any(hasattr(each.kind, "axis") for each in self.arguments)

    @property
    def inputs(self) -> dict[str, str]:
        """The spec string of each tensor argument."""
        specs = {each.name: _spec(each.kind) for each in self.arguments}
        return {name: spec for name, spec in specs.items() if spec is not None}

    @property
    def routes(self) -> dict[str, tuple[str, ...]]:
        """The spec strings of each tensor argument, one for each route; most arguments have one."""
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
        """The validated arguments that a call must pass and that may not be None."""
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
            else:  # a default, or a missing argument, which Python itself reports
                continue
            if value is None and each.takes_none:
                continue
            if each.other_types and _is_one_of(value, each.other_types):
                continue
            if each.is_related:
                if (sentence := each.kind.problem_beside(each.name, value, sizes)) is not None:
                    raise rejection(sentence)
                continue
            problem: str | None = each.kind.problem(value)
            if problem is not None:
                raise rejection(sentence_about(each.name, problem))
        if self.communicates and DEVICE in sizes:
            device, name = sizes[DEVICE]
            if device.type == "meta":
                raise rejection(f"{name} is on meta, without values to communicate; pass a tensor with values")
        if INFERENCE in sizes and GRADIENT in sizes:
            (_, name), (_, other) = sizes[INFERENCE], sizes[GRADIENT]
            raise rejection(f"{name} was made in inference mode but {other} requires a gradient; pass {name}.clone()")


@overload
def contract(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def contract(function: str, /) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def contract(function: Callable[P, R] | str, /) -> Any:
    """Validate the arguments of every call against the function's signature.

    With `@contract`, messages begin with the component and the name of the function or class;
    `@contract("layouts.shard")` sets another beginning. On an autograd Function it decorates `forward`, below
    `@staticmethod`.

    Cost:   about a microsecond per argument in eager mode; nothing in a compiled graph.
    Errors: the decorated function raises TypeError for an argument of a wrong type, ValueError for a wrong value. The
            contract puts the function's name before the sentence of each `Rejected` that the body raises.
    """
    if isinstance(function, str):
        return lambda body: _with_contract(body, function)
    return _with_contract(function, _default_name(function))


def contract_of(public: Any) -> Contract | None:
    """The contract of a function, an autograd Function or a class's constructor, or None."""
    # The decorated object is the function itself, the `forward` of an autograd Function, or the constructor of a class.
    for name in (None, "forward", "__init__", "__post_init__"):
        stated = getattr(public if name is None else getattr(public, name, None), "__contract__", None)
        if stated is not None:
            return stated
    return None


def read_contract(function: Callable[..., Any]) -> Contract:
    """The contract in a function's annotations, whether or not `@contract` decorates it.

    Errors: the exception of an annotation that cannot be evaluated.
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
    # The module is torch_impl.<component>.<file>; messages name the component and not the file.
    component = function.__module__.split(".")[1] if "." in function.__module__ else function.__module__
    qualified = function.__qualname__.rpartition("<locals>.")[2]
    # Of a class's constructor, and of what runs when its objects are called, the class.
    owner, _, method = qualified.rpartition(".")
    return f"{component}.{owner if owner and method in _OF_CLASS else qualified}"


def _read(function: Callable[..., Any], name: str) -> Contract:
    signature = inspect.signature(function)
    defined = inspect.unwrap(function)  # a wrapper of another decorator has the globals of the decorator's module
    arguments = []
    for position, parameter in enumerate(signature.parameters.values()):
        # `*args` and `**kwargs` hold several values, which no kind validates.
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        kind, takes_none, other_types = _kind_of(_meaning(parameter.annotation, defined))
        if kind is not None:
            # A position beyond all positional arguments makes `validate` look it up by name.
            place = len(signature.parameters) if keyword_only else position
            is_related = isinstance(kind, RelatedKind)
            is_required = parameter.default is parameter.empty
            arguments.append(Argument(parameter.name, place, kind, is_related, is_required, takes_none, other_types))
    return Contract(name, tuple(arguments), tuple(_outputs(_meaning(signature.return_annotation, defined))))


def _kind_of(annotation: Any) -> tuple[Kind | RelatedKind | None, bool, tuple[Any, ...]]:
    """(the kind of an annotation, whether it accepts None, the other types that it accepts)."""
    members = list(_members(annotation))
    takes_none = any(member in (None, NoneType) for member in members)
    kinds = [kind for kind in map(_kind_of_member, members) if kind is not None]
    types = tuple(member for member in members if member not in (None, NoneType) and _kind_of_member(member) is None)
    # A union with Any accepts everything, and with two kinds it is ambiguous: neither is validated.
    if len(kinds) != 1 or any(member is Any for member in types):
        return None, takes_none, ()
    return kinds[0], takes_none, types


def _kind_of_member(member: Any) -> Kind | RelatedKind | None:
    if get_origin(member) is Annotated:
        return next((extra for extra in member.__metadata__ if isinstance(extra, (Kind, RelatedKind))), None)
    if get_origin(member) is Literal:
        return OneOf(get_args(member))
    return _of_class(member) if isinstance(member, type) else None


def _of_class(member: type) -> Kind | None:
    """The kind of a plain type: a builtin one, or an instance of a class of this package that is no Protocol."""
    is_ours = member.__module__.partition(".")[0] == __name__.partition(".")[0]
    if is_ours and not getattr(member, "_is_protocol", False):
        return Instance(member, f"pass a {member.__name__}", shows_value=False)
    return BUILTIN.get(member)


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _outputs(annotation: Any) -> Iterator[tuple[str, ...]]:
    """The specs of each form of the result."""
    # Each member of a union is one form of the result; each member of a tuple is one tensor.
    for form in _members(annotation):
        parts = get_args(form) if get_origin(form) is tuple else (form,)
        kinds = [_kind_of(part)[0] for part in parts]  # of a tensor or None, the tensor's
        specs = tuple(spec for spec in map(_spec, kinds) if spec is not None)
        if specs:
            yield specs


def _spec(kind: Any) -> str | None:
    """The spec string of a tensor's kind; None for other kinds."""
    return getattr(kind, "spec", None)


def _is_one_of(value: Any, types: tuple[Any, ...]) -> bool:
    """Whether a value has one of the types; a type that was not imported is compared by name."""
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
    """A placeholder for a name that a module imports only under `if TYPE_CHECKING`."""

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
        """Do nothing; `typing` accepts only callables as types."""


def _meaning(annotation: Any, function: Callable[..., Any]) -> Any:
    """The object that an annotation denotes; evaluates it if it is a string."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    # A name that only a type checker imports becomes a placeholder, so that the rest of the annotation is still used.
    code = compile(annotation, f"<annotation of {function.__qualname__}>", "eval")
    namespace = {**vars(builtins), **function.__globals__, **_nonlocals(function)}
    return eval(code, {name: namespace.get(name, _Unresolved(name)) for name in code.co_names})


def _nonlocals(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function closes over; the cell of `super()` is still empty while its class is defined."""
    nonlocals = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            nonlocals[name] = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    return nonlocals
