"""The rows that a scheme declares as not read, from a case and its inputs. Ranks use this, so it imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declaration_failure import DeclarationFailure, raised_by
from shardproof.declare.draws import Draw, values
from shardproof.draw import inputs

if TYPE_CHECKING:
    from shardproof.declare.declared import Argument


class DrawnInputs(Mapping[str, np.ndarray]):
    """The full inputs of a case by name, each drawn when it is read."""

    def __init__(self, arguments: Mapping[str, Argument], draws: Mapping[str, Draw], case: CaseSpec) -> None:
        self._arguments, self._draws, self._case = arguments, draws, case

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arguments:
            raise DeclarationFailure(f"there is no input {name!r}, but {', '.join(self._arguments)}")
        return inputs.full_array(self._arguments[name], self._draws[name], self._case)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)


@dataclass(frozen=True, eq=False)
class UnreadRows:
    """A user's `rows(case, inputs)`, called with the inputs of a case; `where` names its declaration.

    Errors: DeclarationFailure if it raises, or does not return bools over leading dims of the shape.
    """

    rows: Callable[[CaseSpec, Mapping[str, np.ndarray]], Any]
    where: str
    arguments: Mapping[str, Argument]
    draws: Mapping[str, Draw]

    def __call__(self, case: CaseSpec, shape: tuple[int, ...]) -> np.ndarray:
        try:
            rows = np.asarray(self.rows(case, DrawnInputs(self.arguments, self.draws, case)))
        except DeclarationFailure as failure:
            raise DeclarationFailure(f"{self.where}: {failure}") from None
        except Exception as error:
            raise raised_by(self.where, error) from error
        if rows.dtype != bool or rows.shape != shape[: rows.ndim]:
            returned = f"{rows.dtype} {list(rows.shape)}" if rows.dtype != object else type(rows.item()).__name__
            raise DeclarationFailure(
                f"{self.where} returned {returned}; return bools over leading dims of {list(shape)}"
            )
        return rows


def bound(
    nan_cotangents: Mapping[str, Callable[..., Any]], arguments: tuple[Argument, ...], draws: Mapping[str, Draw]
) -> dict[str, Any]:
    """The fields `draws` and `nan_cotangents` of a scheme; their rows are functions of a case and a shape."""
    draws = {arg.name: draws.get(arg.name, values()) for arg in arguments}
    by_name = {arg.name: arg for arg in arguments}
    # The rows of an input depend on other inputs, which are read without rows of their own.
    plain = {name: replace(draw, nan_rows=None) if isinstance(draw, Draw) else draw for name, draw in draws.items()}
    with_rows = {
        name: replace(draw, nan_rows=UnreadRows(draw.nan_rows, f"nan_rows of {name!r}", by_name, plain))
        for name, draw in draws.items()
        if isinstance(draw, Draw) and draw.nan_rows is not None
    }
    output_rows = {
        name: UnreadRows(rows, f"nan_cotangents[{name!r}]", by_name, plain) for name, rows in nan_cotangents.items()
    }
    return {"draws": {**draws, **with_rows}, "nan_cotangents": output_rows}


def check(nan_cotangents: Mapping[str, Callable[..., Any]], outputs: tuple[Argument, ...], case: CaseSpec) -> None:
    """Call the functions of a case's outputs before its ranks run.  Errors: DeclarationFailure."""
    for arg in outputs:
        if arg.name in case.conditions.get("nan_cotangents", ()):
            nan_cotangents[arg.name](case, arg.shape(case))
