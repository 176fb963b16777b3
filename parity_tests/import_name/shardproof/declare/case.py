"""CaseSpec: all choices that determine one example, small enough for one line of JSON.

Every rank, in any process, builds its own inputs from this record; no array is sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from json import dumps, loads  # a file of schemes may replace the module's own
from typing import Any

FORMAT = 1
ENGINES = ("lockstep", "gloo", "nccl", "torchrun")
LARGEST_WORLD = 64
DTYPES = ("float64", "float32", "bfloat16", "float16")
SPARE = "spare"  # the outer axis added to a scheme's mesh to run it inside a subgroup


LATER = ("dtype", "itemsize", "accumulator_itemsize", "layouts", "lengths", "values", "seed", "conditions")


@dataclass(frozen=True)
class SizesAndOptions:
    """The part of a case that `assume` sees: its mesh, dims and options, by name too. All else is drawn later.

    Errors: ValueError for reading a field that is drawn later.
    """

    scheme: str
    mesh: Mapping[str, int]
    dims: Mapping[str, int]
    options: Mapping[str, Any]

    @property
    def scheme_mesh(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def world(self) -> int:
        return math.prod(self.mesh.values())

    def __getattr__(self, name: str) -> Any:
        for table in ("dims", "mesh", "options"):
            if name in self.__dict__.get(table, {}):
                return self.__dict__[table][name]
        if name in LATER:
            raise ValueError(f"{name} is drawn after sizes and options; declare schemes with other draws instead")
        raise AttributeError(f"case {self.__dict__.get('scheme')!r} has no dim, mesh axis or option {name!r}")


@dataclass(frozen=True, eq=False)
class CaseSpec:
    """One example of a scheme: mesh, dims, dtype, layouts, values, options and seeds.

    `case.b`, `case.tp` and `case.chunk_size` read a dim, a mesh axis or an option by name; declared costs are written
    with these. `schedule` seeds the interleaving of ranks; 0 is round robin. `conditions` are the calling conditions,
    see conditions.py.
    """

    scheme: str
    mesh: Mapping[str, int]
    dims: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    layouts: Mapping[str, Any] = field(default_factory=dict)
    lengths: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    engine: str = "lockstep"
    schedule: int = 0
    conditions: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"case: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.format != FORMAT:
            raise ValueError(f"case: format {self.format} is not {FORMAT}; this file was written by another version")
        for dim, lengths in self.lengths.items():
            if set(lengths) != {"real", "padded"}:
                raise ValueError(
                    f"case: lengths of {dim!r} have {', '.join(sorted(lengths))}; give real and padded ones"
                )
        for axis, size in self.mesh.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"case: mesh axis {axis!r} has size {size!r}; a size is a whole number from 1 on")

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__  # empty during unpickling
        for table in ("dims", "mesh", "options"):
            if name in state.get(table, {}):
                return state[table][name]
        raise AttributeError(f"case {state.get('scheme')!r} has no dim, mesh axis or option {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CaseSpec) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    def _repr_html_(self) -> str:
        from shardproof.report.notebook import of_case

        return of_case(self)

    @property
    def scheme_mesh(self) -> dict[str, int]:
        """The mesh as the scheme sees it, without the axis of a larger world."""
        return {axis: size for axis, size in self.mesh.items() if axis != SPARE}

    @property
    def world(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the tested dtype."""
        return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of one element of the accumulation dtype: float64 for float64, else float32."""
        return max(self.itemsize, 4)

    @cached_property
    def json(self) -> str:
        """Canonical JSON: no blanks, keys sorted, except that mesh axes keep the DeviceMesh's order."""
        record = loads(dumps(asdict(self), sort_keys=True))
        record["mesh"] = dict(self.mesh)
        if not self.conditions:
            del record["conditions"]
        return dumps(record, separators=(",", ":"))

    @property
    def id(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()[:8]

    def replace(self, **changes: Any) -> CaseSpec:
        return replace(self, **changes)

    @classmethod
    def from_json(cls, text: str) -> CaseSpec:
        try:
            record = loads(text)
        except RecursionError:
            raise ValueError("case: is nested too deep") from None
        if not isinstance(record, dict):
            raise ValueError(f"case: is a {type(record).__name__}; a case is a JSON object")
        missing = sorted({"mesh", "scheme"} - set(record))
        if missing:
            raise ValueError(f"case: missing keys {', '.join(missing)}")
        unknown = sorted(set(record) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"case: unknown keys {', '.join(unknown)}")
        _check_kinds(record)
        return cls(**record)


def _check_kinds(record: dict[str, Any]) -> None:
    """Errors: ValueError unless the fields of a record have the right kinds, down to each size, layout and value."""
    for key in ("scheme", "dtype", "engine"):
        if not isinstance(record.get(key, ""), str):
            raise ValueError(f"case: {key} is {record[key]!r}; it is a text")
    for key in ("mesh", "dims", "options", "conditions", "layouts", "lengths", "values"):
        table = record.get(key, {})
        if not isinstance(table, dict):
            raise ValueError(f"case: {key} is {table!r}; it is a JSON object")
        for name, value in table.items():
            if key == "dims" and (type(value) is not int or value < 0):
                raise ValueError(f"case: dim {name!r} has size {value!r}; a size is a whole number from 0 on")
            if key in ("layouts", "lengths", "values") and not isinstance(value, dict):
                raise ValueError(f"case: {key} of {name!r} are {value!r}; they are a JSON object")
    for key in ("seed", "schedule"):
        if type(record.get(key, 0)) is not int or record.get(key, 0) < 0:
            raise ValueError(f"case: {key} is {record[key]!r}; it is a whole number from 0 on")
