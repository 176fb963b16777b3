"""The kinds of arguments without tensors: a number in a range, one of several values, a value of a type.

A kind validates one argument, on every rank and before anything is sent. No value is read from a device, with one
exception: an integer may be a tensor of one element, whose value is read, and on CUDA this waits for the device.
Nothing here loads torch: schedules of pipelines are built and simulated without it.
"""

from __future__ import annotations

import collections.abc
import math
import numbers
from dataclasses import dataclass
from operator import index
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

# Sizes by dim as it is written ("s", "v/tp"), each with the argument that set it; the leading dims under "...". Also a
# number that a later argument is compared with, under the argument's name ("vocab_start_index").
Sizes = dict[str, tuple[Any, str]]


@runtime_checkable
class Kind(Protocol):
    """How one argument is validated."""

    def validate(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        """Validate `value`; `sizes` has the dims of the arguments before it, and takes its own.

        Errors: TypeError for another type, ValueError for another value; `function` and `name` begin the message.
        """
        ...


def type_name(value: object) -> str:
    """The type of a value with its article: `a str`, `an int`; `None` for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@dataclass(frozen=True)
class Number:
    """A number in a range; `remedy` ends the message. Infinity and NaN are rejected, and so is, unless
    it is an `integer`, what no float can represent.

    It may be of any real type, as numpy's float32, in whose precision Python computes with it: a function computes with
    `float` of it.
    """

    low: int | float = -math.inf
    above: bool = False  # whether `low` itself is outside
    integer: bool = False
    remedy: str = ""

    def validate(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        """Reject a `value` outside of the range; `function`, `name` and `sizes` are those of `Kind.validate`.

        Errors: TypeError, ValueError.
        """
        if self.integer:
            if not _is_int(value):
                raise TypeError(f"{function}: {name}={value!r} is {type_name(value)}; pass an int{self.remedy}")
        elif not _is_real(value):
            raise TypeError(f"{function}: {name}={value!r} is {type_name(value)}; pass a number{self.remedy}")
        # With `not`, so that NaN is rejected too: it compares as False.
        if not (value > self.low if self.above else value >= self.low):
            rule = "be positive" if self.above and self.low == 0 else f"be at least {self.low:g}"
            raise ValueError(f"{function}: {name}={value} must {rule}{self.remedy}")
        if not (self.integer or _is_symbolic(value) or _is_finite(value)):
            raise ValueError(f"{function}: {name}={value} must be finite{self.remedy}")


def _is_int(value: Any) -> bool:
    """Whether a value is an integer of Python, numpy or torch, symbolic ones included; a bool is not one."""
    # The usual cases first: `index` and `isinstance` are slower, and `index` fixes a symbolic size.
    if type(value) is int or _is_symbolic(value):
        return True
    if isinstance(value, bool):
        return False
    try:  # a tensor of one integer is an index too; its value is read
        index(value)
    except TypeError:
        return False
    return True


def _is_real(value: Any) -> bool:
    if type(value) is float or type(value) is int or _is_symbolic(value):
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether a real number of any type has a finite float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _is_symbolic(value: Any) -> bool:
    """Whether a value is a size that torch traces as a symbol; `index` would fix it to a number."""
    return type(value).__name__ in ("SymInt", "SymFloat")


@dataclass(frozen=True)
class OneOf:
    """One of several values, as `Literal[...]` lists them."""

    choices: tuple[Any, ...]

    def validate(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        """Reject a `value` that is not among the choices; `function`, `name` and `sizes` are those of `Kind.validate`.

        Errors: ValueError.
        """
        if not any(value is choice or value == choice for choice in self.choices):
            raise ValueError(f"{function}: {name}={value!r} is not one of {', '.join(map(str, self.choices))}")


@dataclass(frozen=True)
class GradientTypeKind:
    """The gradient type of a result that is the same on every rank."""

    def validate(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        if value != "R" and value != "I":
            raise ValueError(
                f"{function}: {name}={value!r} is not the gradient type of a replicated result; "
                "write 'R' (gradients add up) or 'I' (same gradient)"
            )


@dataclass(frozen=True)
class Instance:
    """A value of a type: `bool`, `str` or a class of torch. Of a class the message shows the type alone.

    `type` is what `isinstance` takes, and `advice` ends the message.
    """

    type: Any
    advice: str
    shows_value: bool = True

    def validate(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        """Reject a `value` of another type; `function`, `name` and `sizes` are those of `Kind.validate`.

        Errors: TypeError.
        """
        if not isinstance(value, self.type):
            label = f"{name}={value!r}" if self.shows_value else name
            raise TypeError(f"{function}: {label} is {type_name(value)}; {self.advice}")


@dataclass(frozen=True)
class ListOf:
    """A list or tuple of values of one kind, which `nouns` names. With `if_empty`, an advice, it must not be empty."""

    element: Instance | ListOf
    nouns: str
    if_empty: str | None = None

    @property
    def shows_value(self) -> bool:
        """Whether messages show the value: if they show those of the elements."""
        return self.element.shows_value

    def validate(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        """Reject a `value` that is no such list; `function`, `name` and `sizes` are those of `Kind.validate`.

        Errors: TypeError; ValueError for an empty list where it must not be, and of the elements' kind.
        """
        Instance((list, tuple), f"pass a list of {self.nouns}", self.shows_value).validate(function, name, value, sizes)
        if self.if_empty is not None and not value:
            raise ValueError(f"{function}: {name} is empty; {self.if_empty}")
        for i, element in enumerate(value):
            self.element.validate(function, f"{name}[{i}]", element, sizes)


Positive = Annotated[float, Number(0, above=True)]
NonNegative = Annotated[float, Number(0)]
Finite = Annotated[float, Number()]
PositiveInt = Annotated[int, Number(1, integer=True)]
NonNegativeInt = Annotated[int, Number(0, integer=True)]
GradientType = Annotated[Literal["R", "I"], GradientTypeKind()]

Names = Annotated[list[str], ListOf(Instance(str, "pass a str"), "names")]
Function = Annotated[collections.abc.Callable, Instance(collections.abc.Callable, "pass a function")]

# What an annotation that is a plain type validates; any other annotation validates nothing.
BUILTIN: dict[Any, Kind] = {
    int: Number(integer=True),
    float: Number(),
    bool: Instance(bool, "pass True or False"),
    str: Instance(str, "pass a str"),
}
