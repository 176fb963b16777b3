"""Evidence: one run's data on one wrong tensor, in NumPy arrays only.

Clues read nothing else, so each can be tested on evidence written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardproof.engines.ledger import CallSite, Finding
from shardproof.judge.compare import same_number

SINGLE_ELEMENT = "; rests on a single element"
Layout = Callable[[int, int], Sequence[np.ndarray]]


class ShardedDim(NamedTuple):
    """A sharded dim of this tensor: number `dim`, over `axis`; rank r holds `positions[r]`."""

    dim: int
    axis: str
    layout: str
    positions: Sequence[np.ndarray]


@dataclass(frozen=True, eq=False)
class Evidence:
    """One wrong tensor. Required are name, role and the first three arrays, which have equal shapes.

    `got` is one stitched copy; `at` holds its coordinates on the axes that repeat the tensor. `owners` gives, for each
    axis that shards it, the coordinate that holds each element. `by_rank` gives, for an axis that does not shard it,
    the stacked results of the axis's ranks: copies if the axis is in `at`, else addends. `inputs` could be added to
    this tensor, and have its shape.
    """

    name: str
    role: str  # "output" | "gradient"
    got: np.ndarray
    want: np.ndarray
    budgets: np.ndarray
    axes: Mapping[str, int] = field(default_factory=dict)
    dims: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  # of all dims of the case
    owners: Mapping[str, np.ndarray] = field(default_factory=dict)
    at: Mapping[str, int] = field(default_factory=dict)
    layouts: tuple[ShardedDim, ...] = ()
    custom_layouts: Mapping[str, Layout] = field(default_factory=dict)  # tried besides the built-in layouts
    borders: Mapping[str, np.ndarray] = field(default_factory=dict)  # "sequence boundaries", "padding", ...
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # in full, with the shape of `got`
    before: np.ndarray | None = None  # the old value of an input that the function modifies
    by_rank: Mapping[str, np.ndarray] = field(default_factory=dict)  # axis -> [ranks of the axis, *shape]
    outputs_pass: bool = False
    gradient_is_none: np.ndarray | None = None  # where None was returned; `got` has zeros there
    coarse_budgets: np.ndarray | None = None  # for sums in `coarse_dtype`
    # The budgets for other declared numbers of roundings.
    budgets_by_roundings: Mapping[int, np.ndarray] = field(default_factory=dict)
    wide_sums: bool = False  # promised by the scheme: no intermediate is rounded to a narrow tested dtype
    coarse_dtype: str = "bfloat16"  # COARSER[tested dtype], which for a narrow dtype is that dtype
    narrow_dtype: str | None = None  # of the result, if it rounds more than the tested dtype
    rounded_dtype: str | None = None  # narrower than the tensor's, and has all of its numbers
    max_finite: float = np.inf  # of the tensor's dtype: beyond it an infinity of the same sign is right
    full_mesh_collective: CallSite | None = None  # a collective of all ranks on a mesh with several axes
    first_divergence: Finding | None = None  # between the ranks' ledgers, if they disagree
    shares: Mapping[str, float] = field(default_factory=dict)  # of a mask's or an id input's elements that count
    counts: Mapping[str, int] = field(default_factory=dict)  # of these elements
    summed_axes: frozenset[str] | None = None  # over which a collective of the forward adds; None if unknown

    def __post_init__(self) -> None:
        if not np.shape(self.got) == np.shape(self.want) == np.shape(self.budgets):
            shapes = f"{np.shape(self.got)}, {np.shape(self.want)} and {np.shape(self.budgets)}"
            raise ValueError(f"evidence of {self.name!r}: got, want and budget are {shapes}; they share one shape")

    @cached_property
    def is_wrong(self) -> np.ndarray:
        """Where this copy exceeds its budgets; see `misses_gradient` for missing gradients."""
        return self.differs(self.want)

    @property
    def misses_gradient(self) -> np.ndarray:
        """Where None was returned although the gradient is not zero."""
        if self.gradient_is_none is None:
            return np.zeros(self.want.shape, bool)
        return self.gradient_is_none & (self.want != 0.0)

    @property
    def wrong_count(self) -> int:
        return int(self.is_wrong.sum())

    @property
    def caveat(self) -> str:
        """The ending of a note that rests on one element, because one element fits many patterns; empty otherwise."""
        return SINGLE_ELEMENT if self.got.size == 1 or self.wrong_count == 1 else ""

    def differs(self, expected: np.ndarray, slack: float = 1.0, *, got: np.ndarray | None = None) -> np.ndarray:
        """Where `got` differs from `expected` by more than `slack` budgets.

        NaN equals NaN, and infinities are equal if their signs are. An infinite budget, as for an undefined gradient,
        allows every value.
        """
        got = self.got if got is None else got
        with np.errstate(invalid="ignore", over="ignore"):
            close = np.abs(got - expected) <= slack * self.budgets
        return ~(close | np.isinf(self.budgets) | same_number(got, expected, self.max_finite))

    def fits(self, expected: np.ndarray, slack: float = 1.0) -> bool:
        return not self.differs(expected, slack).any()

    def restricted_to(self, mask: np.ndarray) -> Evidence:
        """The same evidence for the elements of `mask` only, flattened; fields that need the shape are empty."""
        return replace(
            self,
            got=self.got[mask],
            want=self.want[mask],
            budgets=self.budgets[mask],
            dims=(),
            owners={},
            layouts=(),
            borders={},
            inputs={},
            shares={},
            counts={},
            before=None,
            by_rank={},
            gradient_is_none=None if self.gradient_is_none is None else self.gradient_is_none[mask],
            coarse_budgets=None,
            budgets_by_roundings={},
        )

    def dim(self, number: int) -> str:
        return self.dims[number] if number < len(self.dims) else f"dim {number}"
