"""Run a scheme on full arrays from the caller and stitch the ranks' results; nothing is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.engines.engines import run
from shardproof.engines.program import Program, RankResult
from shardproof.engines.stitch import gradient_shards, stitch


def run_unsharded(
    scheme: Declared, arrays: tuple[Any, ...], engine: str, grad: Any, mesh_and_options: Mapping[str, Any]
) -> Any:
    """See Scheme.run."""
    full, dtype = _full_arrays(scheme, arrays)
    dims = _dims_of(scheme, full)
    case = draw_case(scheme, seeded_chooser(0), {**dims, **mesh_and_options}, dtype=dtype, engine=engine, seed=0)
    case = case.replace(lengths=_packed_lengths(scheme, full, case))
    cotangents = None if grad is None else _full_cotangents(scheme, grad, case)
    ranks = run(Program.of(scheme, arrays=full, cotangents=cotangents), case, engine)
    outputs = []
    returned = [arg for arg in scheme.outputs if not arg.modified]
    for arg in returned:
        pieces = [result.outputs[arg.name] for result in ranks.results]
        outputs.append(stitch(arg, pieces, case, scheme.layouts, "output").copies[0])
    shaped = outputs[0] if scheme.output_form == "one" else tuple(outputs)
    if scheme.output_form == "dict":
        shaped = {arg.name: value for arg, value in zip(returned, outputs, strict=True)}
    if grad is None:
        return shaped
    return shaped, {
        arg.name: _gradient(scheme, arg, ranks.results, case) for arg in scheme.inputs if arg.differentiable
    }


def _gradient(scheme: Declared, arg: Argument, results: Sequence[RankResult], case: CaseSpec) -> np.ndarray:
    return stitch(arg, gradient_shards(scheme, arg, case, results), case, scheme.layouts, "gradient").copies[0]


def _full_arrays(scheme: Declared, arrays: tuple[Any, ...]) -> tuple[dict[str, np.ndarray], str]:
    heads = list(dict.fromkeys(arg.name.partition(".")[0] for arg in scheme.inputs))
    if len(arrays) != len(heads):
        raise ValueError(f"scheme '{scheme.name}': takes ({', '.join(heads)}), got {len(arrays)} arrays")
    by_head = dict(zip(heads, arrays, strict=True))
    by_name, dtype = {}, "float64"
    for arg in scheme.inputs:
        head, _, tail = arg.name.partition(".")
        value = by_head[head]
        for key in tail.split(".") if tail else ():
            if key not in value:
                raise ValueError(f"scheme '{scheme.name}': '{head}' has no {key!r}; the scheme takes '{arg.name}'")
            value = value[key]
        if not arg.is_integer:
            name = str(getattr(value, "dtype", "float64")).removeprefix("torch.")
            dtype = name if name in ("float64", "float32", "bfloat16", "float16") else "float64"
        by_name[arg.name] = _as_array(value) if arg.is_integer else np.asarray(_as_array(value), dtype=np.float64)
    return by_name, dtype


def _full_cotangents(scheme: Declared, grad: Any, case: CaseSpec) -> dict[str, np.ndarray]:
    cotangents = grad if isinstance(grad, tuple | list) else (grad,)
    differentiable = [arg for arg in scheme.outputs if arg.differentiable and not arg.modified]
    if len(cotangents) != len(differentiable):
        raise ValueError(
            f"scheme '{scheme.name}': grad has {len(cotangents)} cotangents for {len(differentiable)} outputs"
        )
    by_name = {}
    for arg, value in zip(differentiable, cotangents, strict=True):
        by_name[arg.name] = np.asarray(_as_array(value), dtype=np.float64)
        if by_name[arg.name].shape != arg.shape(case):
            shapes = f"{by_name[arg.name].shape}, '{arg.spec}' says {arg.shape(case)}"
            raise ValueError(f"scheme '{scheme.name}': grad of '{arg.name}' is {shapes}")
    return by_name


def _packed_lengths(
    scheme: Declared, full: Mapping[str, np.ndarray], case: CaseSpec
) -> dict[str, dict[str, list[int]]]:
    """Lengths of the packed sequences in the arguments.

    If only real or only padded lengths are given, both are equal.
    """
    lengths: dict[str, dict[str, list[int]]] = {dim: dict(drawn_record) for dim, drawn_record in case.lengths.items()}
    for dim, record in lengths.items():
        from_inputs = {}
        for arg in scheme.inputs:
            how = scheme.draws[arg.name]
            if how.dim == dim and how.kind in ("offsets", "lengths"):
                array = full[arg.name]
                from_inputs["padded" if how.padded else "real"] = (
                    np.diff(array) if how.kind == "offsets" else array
                ).tolist()
        for one, other in (("padded", "real"), ("real", "padded")):
            record[one] = from_inputs.get(one) or from_inputs.get(other) or record[one]
    return lengths


def _dims_of(scheme: Declared, full: Mapping[str, np.ndarray]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for arg in scheme.inputs:
        shape = full[arg.name].shape
        if len(shape) != len(arg.spec.dims):
            raise ValueError(f"scheme '{scheme.name}': '{arg.name}' is {shape}, its spec is '{arg.spec}'")
        for dim, size in zip(arg.spec.dims, shape, strict=True):
            if dims.setdefault(dim.name, size) != size:
                raise ValueError(f"scheme '{scheme.name}': {dim.name} is {dims[dim.name]} and {size} ('{arg.name}')")
    return {name: size for name, size in dims.items() if not name.isdigit()}


def _as_array(value: Any) -> np.ndarray:
    """A NumPy array from NumPy, torch or JAX."""
    if hasattr(value, "detach"):
        value = value.detach().double() if value.is_floating_point() else value.detach()
    return np.asarray(value)
