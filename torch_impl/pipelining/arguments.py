"""What the functions of this folder refuse about numbers and switches: `bool` is no int, and sizes start at 1."""

from __future__ import annotations

from fractions import Fraction

Number = int | float | Fraction


def check_int(function: str, name: str, value: object) -> None:
    """An int. Errors: TypeError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"pipelining.{function}: {name}={value!r} is a {type(value).__name__}; pass an int")


def check_positive(function: str, name: str, value: object) -> None:
    """An int of at least 1. Errors: TypeError; ValueError."""
    check_int(function, name, value)
    if value < 1:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"pipelining.{function}: {name}={value} must be a positive int; pass 1 or more")


def check_switch(function: str, name: str, value: object) -> None:
    """True or False. Errors: TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"pipelining.{function}: {name}={value!r} is a {type(value).__name__}; pass True or False")


def check_text(function: str, name: str, value: object) -> None:
    """A str. Errors: TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"pipelining.{function}: {name}={value!r} is a {type(value).__name__}; pass a str")
