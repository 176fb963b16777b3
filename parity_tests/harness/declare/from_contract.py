"""Specs that a scheme does not write out: taken from a contract, a function's annotated signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_impl.contract import contract_of, read_contract


def specs(
    fn: Callable[..., Any],
    signature: Sequence[str],
    contract: Callable[..., Any] | None,
    inputs: Mapping[str, Any] | None,
    outputs: Any,
    errors: Callable[[str], ValueError],
) -> tuple[Any, Any]:
    """The specs of the inputs and outputs of `fn`: as declared, else from the contract.

    Takes the contract's inputs with names in `signature`, and the first form of its result.
    """
    if inputs is not None and outputs is not None:
        return inputs, outputs
    name = getattr(contract or fn, "__name__", "the function")
    stated = contract_of(contract or fn) or (read_contract(fn) if contract is None else None)
    if stated is None or not (stated.inputs or stated.outputs):
        missing = "inputs" if inputs is None else "outputs"
        raise errors(f"has no {missing}, and the signature of {name} states no contract; pass {missing}")
    if inputs is None:
        inputs = {key: spec for key, spec in stated.inputs.items() if key in signature}
        if not inputs:
            raise errors(
                f"takes ({', '.join(signature)}), of which the contract of {name} has none "
                f"({', '.join(stated.inputs)}); name the arguments alike, or pass inputs"
            )
    if outputs is None:
        if not stated.outputs:
            raise errors(f"has no outputs, and the signature of {name} states none; pass outputs")
        form = tuple(stated.outputs[0])
        outputs = form[0] if len(form) == 1 else form
    return inputs, outputs
