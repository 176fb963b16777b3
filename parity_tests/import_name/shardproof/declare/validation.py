"""Checks of @scheme at declaration; each error says how to fix it.

`errors(text)` creates the exception to raise, with the scheme's name before the text; independent errors are collected,
so that all of them are reported at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args, get_origin

from shardproof.declare.case import DTYPES, ENGINES
from shardproof.declare.conditions import CONDITIONS, LARGER_WORLD, excluded_by_default
from shardproof.declare.declaration_errors import DeclarationErrors
from shardproof.declare.declared import Argument
from shardproof.declare.dim_formulas import names_of
from shardproof.declare.draws import Draw
from shardproof.declare.more_draws import OfFunction, draw_of
from shardproof.declare.spec import BUILTIN, NO_TYPE, Spec, parse

INTEGER = ("int", "uint", "bool")
NO_DRAW = OfFunction("own")  # replaces an invalid draw, which may or may not give integers
SHARED = ("torch", "numpy", "jax")  # packages too large to copy for each rank


def function_names(fn: Any, errors: DeclarationErrors) -> tuple[str, ...]:
    """Names of the function's arguments after `mesh`; rejects anything but a plain function."""
    kinds = {
        "a coroutine function": inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn),
        "a generator function": inspect.isgeneratorfunction(fn),
        "a method": inspect.ismethod(fn),
        "a class": inspect.isclass(fn),
    }
    for kind, holds in kinds.items():
        if holds:
            raise errors(f"must be a plain function; got {kind}")
    if not inspect.isfunction(fn):
        raise errors(f"must be a plain function; got {type(fn).__name__}")
    parameters = list(inspect.signature(fn).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        raise errors("must name its arguments; *args, **kwargs and positional-only arguments cannot be matched")
    if not parameters or parameters[0].name != "mesh":
        raise errors("must take the mesh first: def f(mesh, ...)")
    return tuple(p.name for p in parameters[1:])


def check_mesh(mesh: Any, errors: DeclarationErrors) -> None:
    if not isinstance(mesh, Mapping) or not mesh:
        raise errors("mesh must be a dict of axis -> sizes, such as {'tp': (1, 2, 4)}")
    for axis, sizes in mesh.items():
        if isinstance(sizes, int | str) or not sizes:
            raise errors(f"mesh[{axis!r}] is {sizes!r}; give a tuple of sizes, such as (1, 2, 4)")
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise errors(f"mesh[{axis!r}] has {size!r}; sizes are integers >= 1")


def of_one_rank(mesh: Mapping[str, Any]) -> list[str]:
    """Axes with one rank on every mesh: a scheme for one device names such an axis and has no type to choose."""
    return [axis for axis, sizes in mesh.items() if tuple(sizes) == (1,)]


def input_arguments(
    fn: Any,
    signature: Sequence[str],
    inputs: Mapping[str, Any],
    mesh: Mapping[str, Any],
    custom: Mapping[str, Any],
    draw: Mapping[str, Draw],
    nograd: Sequence[str],
    errors: DeclarationErrors,
) -> tuple[Argument, ...]:
    if not isinstance(inputs, Mapping) or not inputs:
        raise errors("inputs must be a dict of argument -> spec")
    shadowed = sorted(set(custom) & set(BUILTIN))
    if shadowed:
        raise errors(f"layout {shadowed[0]!r} is built in; give yours another name")
    for name in inputs:
        with errors.collected():
            if name not in signature:
                raise errors(f"inputs has {name!r}, the function has ({', '.join(signature)})")
    if not set(inputs) <= set(signature):
        errors.raise_all()
    flat = dict(_leaves(inputs))
    if isinstance(nograd, str):
        raise errors(f"nograd is the text {nograd!r}; write ({nograd!r},)")
    for name in nograd:
        with errors.collected():
            if name not in flat:
                raise errors(f"nograd has {name!r}, the inputs are ({', '.join(flat)})")
    annotations = _annotations(fn)
    arguments = []
    for path, text in flat.items():
        path_draw = draw.get(path)
        is_integer = path_draw.is_integer if path_draw else _is_integer(annotations.get(path))
        with errors.collected():
            typeless_ok = path in nograd or path_draw == NO_DRAW
            is_of_floats = annotations.get(path) is not None or path_draw is not None
            remedy = "" if is_of_floats else f"; if it has integers, give draw={{'{path}': token_below(...)}}"
            spec = _parsed(text, mesh, custom, "input", path, not is_integer, typeless_ok, errors, remedy)
            arguments.append(Argument(path, spec, is_integer, path in nograd))
        with errors.collected():
            if is_integer and path_draw is None:
                raise errors(
                    f"'{path}' is an integer and has no draw; give draw={{'{path}': token_below(...)}} or integers(...)"
                )
    return tuple(arguments)


def output_arguments(
    fn: Any, outputs: Any, mesh: Mapping[str, Any], custom: Mapping[str, Any], errors: DeclarationErrors
) -> tuple[Argument, ...]:
    if isinstance(outputs, Mapping):
        specs = list(outputs.items())
    elif isinstance(outputs, tuple | list):
        specs = [(f"out[{i}]", text) for i, text in enumerate(outputs)]
    else:
        specs = [("out", outputs)]
    if not specs:
        raise errors("outputs is empty; a scheme returns at least one tensor")
    returned = _annotations(fn).get("return")
    annotations = get_args(returned) if get_origin(returned) is tuple else (returned,) * len(specs)
    if len(annotations) != len(specs):
        raise errors(f"the return annotation has {len(annotations)} tensors, outputs has {len(specs)}")
    arguments = []
    for (name, text), annotation in zip(specs, annotations, strict=True):
        is_integer = _is_integer(annotation)
        with errors.collected():
            spec = _parsed(text, mesh, custom, "output", name, not is_integer, False, errors)
            arguments.append(Argument(name, spec, is_integer))
    return tuple(arguments)


def modified_arguments(
    modifies: Any, leaves: Sequence[Argument], results: Sequence[Argument], errors: DeclarationErrors
) -> tuple[Argument, ...]:
    """The inputs that the function overwrites, as outputs: their new values are judged."""
    if isinstance(modifies, str) or not all(isinstance(name, str) for name in modifies):
        raise errors(f"modifies is {modifies!r}; give a tuple of inputs, such as ('logits',)")
    by_name = {arg.name: arg for arg in leaves}
    for name in modifies:
        if name not in by_name:
            raise errors(f"modifies has {name!r}, the inputs are ({', '.join(by_name)})")
        if name in {arg.name for arg in results}:
            raise errors(f"modifies has {name!r}, which is an output's name too; give the output another")
    return tuple(replace(by_name[name], modified=True, nograd=False) for name in modifies)


def check_module(
    module: Any, inputs: Mapping[str, Any], results: Sequence[Argument], form: Any, errors: DeclarationErrors
) -> None:
    """`module` must name a tree of inputs, and the first output is the loss that the function ran backward."""
    if module is None:
        return
    if not isinstance(module, str) or not isinstance(inputs.get(module), Mapping):
        trees = ", ".join(name for name, spec in inputs.items() if isinstance(spec, Mapping)) or "none is"
        raise errors(f"module is {module!r}; name the input that is a tree of parameters ({trees})")
    if isinstance(form, Mapping) or results[0].spec.dims or results[0].is_integer:
        raise errors(
            f"module={module!r}: the first output is the loss, a scalar such as 'dp=I'; got '{results[0].spec}'"
        )


def check_axes_used(
    mesh: Mapping[str, Any], leaves: Sequence[Argument], results: Sequence[Argument], errors: DeclarationErrors
) -> None:
    used = {axis for arg in (*leaves, *results) for axis in (*arg.spec.axes, *dict(arg.spec.types))}
    for axis in mesh:
        if axis not in used and axis not in of_one_rank(mesh):
            raise errors(f"axis {axis!r} is in mesh and in no spec; drop it")


def check_arguments(
    fn: Any,
    signature: Sequence[str],
    inputs: Mapping[str, Any],
    choices: tuple[Mapping[str, Any], Mapping[str, Any]],
    reference: Any,
    errors: DeclarationErrors,
) -> None:
    """The function and the reference take the inputs and the options; `choices` holds common and rank-only options."""
    check_options(signature, inputs, *choices, errors)
    check_reference(signature, inputs, choices[0], reference, errors)
    check_covered(fn, (*inputs, *choices[0], *choices[1]), errors)


def check_options(
    signature: Sequence[str],
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    rank_options: Mapping[str, Any],
    errors: DeclarationErrors,
) -> None:
    for name in rank_options:
        if name in options:
            raise errors(f"option {name!r} is declared twice")
    for name, choices in {**options, **rank_options}.items():
        if name in inputs:
            raise errors(f"option {name!r} is declared twice")
        if name not in signature:
            raise errors(f"option {name!r} is not an argument of the function ({', '.join(signature)})")
        if not isinstance(choices, tuple | list) or not choices:
            raise errors(f"option {name!r} is {choices!r}; give a tuple of values to try")


def check_reference(
    signature: Sequence[str],
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    reference: Any,
    errors: DeclarationErrors,
) -> None:
    """The reference must take the inputs and the options by name; other parameters need a default."""
    if not callable(reference):
        raise errors(f"reference is {type(reference).__name__}; pass a JAX function")
    title = name_of_reference(reference)
    try:
        parameters = inspect.signature(reference).parameters
    except ValueError:  # a compiled callable may have no signature
        return
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters.values()):
        raise errors(f"{title} has positional-only arguments; wrap it in a function that names them")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    required = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and n != "mesh"
    ]
    arguments = [*inputs, *options]
    asks = f"takes ({', '.join(signature)}) but {title} takes ({', '.join(parameters)})"
    missing = [name for name in required if name not in arguments]
    if missing:
        kinds = "input or option" if options else "input"
        if missing[0] in signature:
            where = "inputs or options" if options else "inputs"
            raise errors(f"takes {missing[0]!r}, as {title} does, but it is not among the {where}: add it")
        raise errors(
            f"{asks}; its argument {missing[0]!r} is not an {kinds} of the scheme ({', '.join(arguments)}): "
            "rename it or add it"
        )
    unknown = [name for name in arguments if name not in parameters]
    if unknown:
        kind = "inputs" if unknown[0] in inputs else "options (rank_options go to the ranks alone)"
        raise errors(f"{asks}; it has no {unknown[0]!r} of {kind}")


def name_of_reference(reference: Any) -> str:
    """The name of a reference in error messages, unless its name is just `reference`."""
    name = getattr(reference, "__name__", type(reference).__name__)
    return "the reference" if name == "reference" else f"reference {name}"


def check_covered(fn: Any, names: Sequence[str], errors: DeclarationErrors) -> None:
    """Every parameter without a default must be an input or an option."""
    for parameter in list(inspect.signature(fn).parameters.values())[1:]:
        if parameter.default is parameter.empty and parameter.name not in names:
            raise errors(f"takes {parameter.name!r}, which is neither an input nor an option; add it to inputs")


def user_draws(fn: Any, draw: Mapping[str, Any], errors: DeclarationErrors) -> dict[str, Draw]:
    """The draws, with functions and strategies converted; of integers if the annotation says so."""
    if not isinstance(draw, Mapping):
        raise errors(f"draw is {type(draw).__name__}; give a dict of input -> draw")
    annotations, draws = _annotations(fn), {}
    for name, how in draw.items():
        draws[name] = how if isinstance(how, Draw) else NO_DRAW
        with errors.collected():
            if not isinstance(how, Draw):
                draws[name] = draw_of(how, _is_integer(annotations.get(name)), f"{errors.title}draw[{name!r}]")
    return draws


def check_draws(
    leaves: Sequence[Argument], draw: Mapping[str, Draw], sizes: Mapping[str, Any], errors: DeclarationErrors
) -> None:
    dims = {name for arg in leaves for name in names_of(arg)} | set(sizes)
    makers = {"ids": "token_below"}
    for name, how in draw.items():
        with errors.collected():
            if name not in {arg.name for arg in leaves}:
                raise errors(f"draw has {name!r}, the inputs are ({', '.join(arg.name for arg in leaves)})")
            if how.dim is not None and how.dim not in dims:
                maker = makers.get(how.kind, how.kind)
                raise errors(f"draw[{name!r}] = {maker}({how.dim!r}): no input has dim {how.dim}")


def check_promises(
    roundings: Any,
    sums: Any,
    inside: Any,
    ties: Any,
    nan_cotangents: Mapping[str, Any],
    results: Sequence[Argument],
    errors: DeclarationErrors,
) -> None:
    """Errors: for other values than these keywords take, and for promises that contradict each other."""
    if not isinstance(roundings, int) or roundings < 0:
        raise errors(f"roundings is {roundings!r}; count the times an intermediate is stored in the dtype")
    if sums not in (None, "float32"):
        raise errors(f"sums is {sums!r}; write 'float32', or leave it out")
    if inside not in (None, "bfloat16", "float16"):
        raise errors(f"inside is {inside!r}; write 'bfloat16' or 'float16', or leave it out")
    if sums and inside:
        raise errors(f"sums={sums!r} rounds no intermediate, inside={inside!r} rounds some; leave one out")
    if ties not in (None, "ordered"):
        raise errors(f"ties is {ties!r}; write 'ordered', or leave it out")
    check_nan_cotangents(nan_cotangents, results, errors)


def check_choices(
    dtypes: Sequence[str],
    engines: Sequence[str],
    replicas: str,
    reduction: Sequence[str] | None,
    leaves: Sequence[Argument],
    results: Sequence[Argument],
    errors: DeclarationErrors,
) -> None:
    for name, value in (("dtypes", dtypes), ("engines", engines)):
        if isinstance(value, str):
            raise errors(f"{name} is the text {value!r}; write ({value!r},)")
    for dtype in dtypes:
        with errors.collected():
            if dtype not in DTYPES:
                raise errors(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    for engine in engines:
        with errors.collected():
            if engine not in ENGINES:
                raise errors(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    with errors.collected():
        if replicas not in ("bitwise", "budget"):
            raise errors(f"replicas is {replicas!r}; write 'bitwise' or 'budget'")
    dims = {name for arg in (*leaves, *results) for name in (*arg.spec.dim_names, *names_of(arg))}
    for name in reduction or ():
        with errors.collected():
            if name not in dims:
                raise errors(f"reduction has {name!r}; the dims are ({', '.join(sorted(dims))})")


def excluded_conditions(module: str, names: Any, errors: DeclarationErrors) -> tuple[str, ...]:
    """The calling conditions that are not drawn for a scheme of this module."""
    names = excluded_by_default(module) if names is None else names
    conditions = (*CONDITIONS, LARGER_WORLD)
    if isinstance(names, str):
        raise errors(f"excluded_conditions is the text {names!r}; write ({names!r},)")
    unknown = [name for name in names if name not in conditions]
    if unknown:
        raise errors(f"excluded_conditions has {unknown[0]!r}; give a tuple of {', '.join(conditions)}")
    return tuple(names)


def check_nan_cotangents(rows: Any, results: Sequence[Argument], errors: DeclarationErrors) -> None:
    """`nan_cotangents` must be functions of the case and its inputs, by the names of floating outputs."""
    names = [arg.name for arg in results if arg.differentiable and not arg.modified]
    if not isinstance(rows, Mapping):
        raise errors(f"nan_cotangents is {type(rows).__name__}; give a dict: {{'out': rows}}")
    for name, function in rows.items():
        if name not in names:
            raise errors(f"nan_cotangents has {name!r}; the floating outputs are ({', '.join(names)})")
        if not callable(function):
            raise errors(f"nan_cotangents[{name!r}] is {type(function).__name__}; give a function (case, inputs)")


def check_surroundings(
    setup: Any, around: Any, assume: Any, isolate: Any, cost: Any, inputs: Mapping[str, Any], errors: DeclarationErrors
) -> None:
    """`setup` and `around` must be functions of the mesh, `assume` of the case, `cost` of the case and of inputs."""
    if not isinstance(isolate, tuple | list) or not all(isinstance(name, str) for name in isolate):
        raise errors(f"isolate is {isolate!r}; give a tuple of module names, such as ('megatron.core',)")
    if cost is not None:
        _check_cost(cost, inputs, errors)
    for name in isolate:
        if name in SHARED:
            raise errors(f"isolate names {name!r}, whose thousand modules ranks share; name the one that is changed")
    for name, function, of in (("setup", setup, "mesh"), ("around", around, "mesh"), ("assume", assume, "case")):
        if function is None:
            continue
        if not callable(function):
            raise errors(f"{name} is {type(function).__name__}; pass a function of the {of}: def {name}({of}): ...")
        if inspect.isgeneratorfunction(function):
            remedy = "; decorate it with contextlib.contextmanager" if name == "around" else ", which would never run"
            raise errors(f"{name} is a generator function{remedy}")
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            parameters = ", ".join(inspect.signature(function).parameters)
            raise errors(f"{name} takes ({parameters}); it is called with the {of} alone") from None
        except ValueError:  # a builtin may have no signature
            continue


def _check_cost(cost: Any, inputs: Mapping[str, Any], errors: DeclarationErrors) -> None:
    """A cost must be a function of the case and of the inputs that its other parameters name."""
    if not callable(cost):
        raise errors(f"cost is {type(cost).__name__}; pass a function of the case: def cost(case): ...")
    for name, parameter in list(inspect.signature(cost).parameters.items())[1:]:
        if name not in inputs and parameter.default is inspect.Parameter.empty:
            raise errors(f"cost takes {name!r}, which is not an input of the scheme ({', '.join(inputs)})")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat += _leaves(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return flat


def _parsed(
    text: Any,
    mesh: Mapping[str, Any],
    custom: Mapping[str, Any],
    role: str,
    name: str,
    differentiable: bool,
    typeless_ok: bool,
    errors: DeclarationErrors,
    if_no_type: str = "",
) -> Spec:
    layouts = (*BUILTIN, *custom)
    try:
        return parse(
            text,
            tuple(mesh),
            layouts,
            role=role,
            name=name,
            differentiable=differentiable,
            typeless_ok=typeless_ok,
            of_one_rank=of_one_rank(mesh),
        )
    except ValueError as error:
        raise errors(f"{error}{if_no_type if NO_TYPE in str(error) else ''}") from None


def _annotations(fn: Any) -> dict[str, Any]:
    try:
        return inspect.get_annotations(fn, eval_str=True)
    except Exception:  # an annotation that cannot be evaluated implies no dtype
        return {}


def _is_integer(annotation: Any) -> bool:
    if any(
        getattr(kind, "dtypes", None) in ("ids", "integer", "bool") for kind in getattr(annotation, "__metadata__", ())
    ):
        return True
    dtypes = getattr(annotation, "dtypes", None)
    return isinstance(dtypes, list | tuple) and bool(dtypes) and all(str(d).startswith(INTEGER) for d in dtypes)
