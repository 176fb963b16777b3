"""The dtypes that a scheme declares: of its outputs by `wide`, of its inputs by `wider_inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.declare.conditions import of_nearest
from shardproof.declare.declaration_errors import DeclarationErrors
from shardproof.declare.declared import Argument

WIDE = "WIDE_OUTPUTS"  # a module or package sets the default of `wide` for its schemes by this name
WIDENED = {"bfloat16": "float32", "float16": "float32"}


def checked(
    module: str,
    wide: bool | Sequence[str] | None,
    wider_inputs: Sequence[str],
    inputs: Sequence[Argument],
    outputs: Sequence[Argument],
    errors: DeclarationErrors,
) -> dict[str, Any]:
    """Both declarations as fields of a scheme; their errors are collected."""
    with errors.collected():
        _check_wider_inputs(wider_inputs, inputs, errors)
    wide_outputs = errors.of(_wide_outputs, module, wide, outputs)
    return {"wide": wide_outputs, "wider_inputs": () if errors.texts else tuple(wider_inputs)}


def _wide_outputs(
    module: str, wide: bool | Sequence[str] | None, outputs: Sequence[Argument], errors: DeclarationErrors
) -> tuple[str, ...] | None:
    """The outputs that are float32 or wider: from the keyword, or else from the module or its packages.

    Errors: for a text, or a name that no output has.
    """
    names, wide = _floating(outputs), of_nearest(module, WIDE, None) if wide is None else wide
    if wide is None or isinstance(wide, bool):
        return wide if wide is None else names * wide
    if not _are_names(wide, names):
        raise errors(f"wide is {wide!r}; name outputs of ({', '.join(names)}) in a tuple, or write True for all")
    return tuple(wide)


def _check_wider_inputs(names: Sequence[str], inputs: Sequence[Argument], errors: DeclarationErrors) -> None:
    """Errors: for a text, or a name that no floating input has."""
    floating = _floating(inputs)
    if not _are_names(names, floating):
        raise errors(f"wider_inputs is {names!r}; name inputs of ({', '.join(floating)}) in a tuple")


def _are_names(value: object, names: Sequence[str]) -> bool:
    return isinstance(value, tuple | list) and all(name in names for name in value)


def declared_dtypes(outputs: Sequence[Argument], wide: tuple[str, ...] | None, dtype: str) -> dict[str, str]:
    """The dtype of each floating output for inputs of the tested `dtype`; none if nothing is declared."""
    if wide is None:
        return {}
    return {name: WIDENED.get(dtype, dtype) if name in wide else dtype for name in _floating(outputs)}


def _floating(arguments: Sequence[Argument]) -> tuple[str, ...]:
    return tuple(arg.name for arg in arguments if not arg.is_integer and not arg.modified)
