"""The rejection of an argument; the border of a contracted function adds the function's name."""

from __future__ import annotations

from typing import overload


class TypeProblem(str):
    """Why a value is rejected, if its type is the reason: raised as a TypeError."""


@overload
def sentence_about(name: str, problem: str) -> str: ...
@overload
def sentence_about(name: str, problem: str | None) -> str | None: ...
def sentence_about(name: str, problem: str | None) -> str | None:
    """The problem of a value, if it has one, in a sentence about `name`: an argument or a part of one (`[1]`)."""
    if problem is None:
        return None
    return type(problem)(f"{name}{problem}")


class Rejected(ValueError):
    """Raised inside a contracted function, with a sentence that names the argument, its value and the remedy.

        raise Rejected(f"k={k} of e={experts} experts; choose at most e")

    The innermost contracted function around it raises an `error` in its place, and puts its own name first: the
    sentence is about its arguments. A caller sees a plain ValueError or TypeError, with one name.
    """

    def __init__(self, sentence: str, error: type[Exception] = ValueError) -> None:
        super().__init__(sentence)
        self.error = error

    def named(self, function: str) -> Exception:
        """The error that a caller of `function` sees, with the traceback from inside of it."""
        inside = self.__traceback__.tb_next if self.__traceback__ else None  # without the border, which raises again
        return self.error(f"{function}: {self}").with_traceback(inside)


def rejection(problem: str) -> Rejected:
    """The rejection for a kind's `problem`, in a whole sentence: a TypeError for a `TypeProblem`."""
    return Rejected(problem, TypeError if isinstance(problem, TypeProblem) else ValueError)
