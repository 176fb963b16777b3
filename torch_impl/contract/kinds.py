"""Kinds of arguments other than tensors: a number in a range, one of several values, an instance of a type.

A kind validates one argument, on every rank and before any collective. No value is read from a device, with one
exception: an integer may be a tensor of one element. Its value is read, and on CUDA this waits for the device.
Nothing here loads torch, so pipeline schedules can be built and simulated without it.
"""

from __future__ import annotations

import collections.abc
import math
import numbers
from dataclasses import dataclass
from operator import index
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from torch_impl.contract.rejected import TypeProblem, rejection, sentence_about

# Sizes by dim as written ("s", "v/tp"), each with the name of the argument that set it; the leading dims under "...". A
# number that a later argument is compared with is stored under its argument's name ("vocab_start_index").
Sizes = dict[str, tuple[Any, str]]
LARGEST = 2**63 - 1  # of torch's integers
# Further keys, which begin with a blank as no dim does: the tensors' device, a tensor that autograd cannot save, and a
# tensor that autograd follows.
DEVICE, INFERENCE, GRADIENT = " device", " inference", " gradient"


@runtime_checkable
class Kind(Protocol):
    """The validation of one argument."""

    def problem(self, value: Any) -> str | None:
        """Why `value` is invalid, as the text after the argument's name (`=0 must be positive`); None if it is valid.

        A `TypeProblem` is raised as a TypeError, another text as a ValueError.
        """
        ...


@runtime_checkable
class RelatedKind(Protocol):
    """A kind that compares an argument with the arguments before it."""

    def problem_beside(self, name: str, value: Any, sizes: Sizes) -> str | None:
        """The sentence that rejects `value` as the argument `name`; None if it is valid.

        `sizes` has the dims of the arguments before it; the dims of `value` are added. A `TypeProblem` is as in
        `Kind.problem`.
        """
        ...


def check(kind: Kind | RelatedKind, name: str, value: Any, sizes: Sizes | None = None) -> None:
    """Reject a `value` that is not an argument itself, such as an entry of a dict; messages call it `name`.

    `kind` and `sizes` are as in `Contract.validate`. Errors: Rejected.
    """
    if isinstance(kind, RelatedKind):
        sentence = kind.problem_beside(name, value, {} if sizes is None else sizes)
    else:
        sentence = sentence_about(name, kind.problem(value))
    if sentence is not None:
        raise rejection(sentence)


def type_name(value: object) -> str:
    """The type of a value with its article: `a str`, `an int`; `None` for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@dataclass(frozen=True)
class Number:
    """A number in a range; `remedy` ends the message.

    Infinity, NaN and integers that torch cannot represent are rejected. Any real type is accepted, such as numpy's
    float32. Python would compute in that type's precision, so functions convert the number with `float`.
    """

    low: int | float = -math.inf
    above: bool = False  # whether `low` itself is outside
    integer: bool = False
    remedy: str = ""

    def problem(self, value: Any) -> str | None:
        """Why a `value` of another type or outside of the range is rejected; else None."""
        if self.integer:
            if not _is_int(value):
                return TypeProblem(f"={value!r} is {type_name(value)}; pass an int{self.remedy}")
        elif not _is_real(value):
            return TypeProblem(f"={value!r} is {type_name(value)}; pass a number{self.remedy}")
        if not (self.integer or _is_symbolic(value) or _is_finite(value)):
            return f"={value} must be finite{self.remedy}"
        if (problem := too_large(value)) is not None:
            return f"{problem}{self.remedy}"
        if not (value > self.low if self.above else value >= self.low):
            rule = "be positive" if self.above and self.low == 0 else f"be at least {self.low:g}"
            return f"={value} must {rule}{self.remedy}"
        return None


def too_large(value: Any) -> str | None:
    """The problem of an integer that torch cannot represent; None for any other number."""
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"={value} is beyond torch's integers; pass at most 2**63 - 1"
    return None


def _is_int(value: Any) -> bool:
    """Whether a value is an integer of Python, numpy or torch, possibly symbolic, and not a bool."""
    # The usual cases first: `index` and `isinstance` are slower, and `index` would specialize a symbolic size.
    if type(value) is int or _is_symbolic(value):
        return True
    if isinstance(value, bool):
        return False
    try:  # also accepts a tensor of one integer, and reads its value
        index(value)
    except TypeError:
        return False
    return True


def _is_real(value: Any) -> bool:
    if type(value) is float or type(value) is int or _is_symbolic(value):
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether a real number of any type is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic size of torch's tracing."""
    return type(value).__name__ in ("SymInt", "SymFloat")


@dataclass(frozen=True)
class OneOf:
    """One of several values, as `Literal[...]` lists them."""

    choices: tuple[Any, ...]

    def problem(self, value: Any) -> str | None:
        """Why a `value` that is not among the choices is rejected; else None."""
        if any(value is choice or value == choice for choice in self.choices):
            return None
        return f"={value!r} is not one of {', '.join(map(str, self.choices))}"


@dataclass(frozen=True)
class GradientTypeKind:
    """The gradient type of a replicated result: "R" or "I"."""

    def problem(self, value: Any) -> str | None:
        if value == "R" or value == "I":
            return None
        return (
            f"={value!r} is not the gradient type of a replicated result; "
            "write 'R' (gradients add up) or 'I' (same gradient)"
        )


@dataclass(frozen=True)
class Instance:
    """An instance of `type`, or of one type in a tuple: `bool`, `str` or a class of torch.

    `advice` ends the message. Without `shows_value` the message shows only the type of the value.
    """

    type: Any
    advice: str
    shows_value: bool = True

    def problem(self, value: Any) -> str | None:
        """Why a `value` of another type is rejected; else None."""
        if isinstance(value, self.type):
            return None
        shown = f"={value!r}" if self.shows_value else ""
        return TypeProblem(f"{shown} is {type_name(value)}; {self.advice}")


@dataclass(frozen=True)
class ListOf:
    """A list or tuple with elements of one kind; messages call the elements `nouns`.

    An empty list is rejected with the advice `if_empty`, if one is given.
    """

    element: Instance | ListOf
    nouns: str
    if_empty: str | None = None

    @property
    def shows_value(self) -> bool:
        """Whether messages show the value: as messages about an element do."""
        return self.element.shows_value

    def problem(self, value: Any) -> str | None:
        """Why a `value` is not a list of such elements; None if it is."""
        problem = Instance((list, tuple), f"pass a list of {self.nouns}", self.shows_value).problem(value)
        if problem is not None:
            return problem
        if self.if_empty is not None and not value:
            return f" is empty; {self.if_empty}"
        for i, element in enumerate(value):
            problem = self.element.problem(element)
            if problem is not None:
                return sentence_about(f"[{i}]", problem)
        return None


Positive = Annotated[float, Number(0, above=True)]
NonNegative = Annotated[float, Number(0)]
Finite = Annotated[float, Number()]
PositiveInt = Annotated[int, Number(1, integer=True)]
NonNegativeInt = Annotated[int, Number(0, integer=True)]
GradientType = Annotated[Literal["R", "I"], GradientTypeKind()]

Names = Annotated[collections.abc.Sequence[str], ListOf(Instance(str, "pass a str"), "names")]
Function = Annotated[collections.abc.Callable, Instance(collections.abc.Callable, "pass a function")]

# The validation of annotations that are plain types; other types are not validated.
BUILTIN: dict[Any, Kind] = {
    int: Number(integer=True),
    float: Number(),
    bool: Instance(bool, "pass True or False"),
    str: Instance(str, "pass a str"),
}
