"""A scheme's specs from a contract, the annotated signature of a function.

A scheme may leave out the specs that its contract states. A scheme about one layout, one mesh or one form of the result
writes its own specs, which must be an instance of the contract's. This module checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.declare.declared import flat
from shardproof.declare.instance import Meaning, instance_of, meaning_of
from torch_impl.contract import Contract, contract_of, read_contract, spec_line


def specs(
    fn: Callable[..., Any],
    signature: Sequence[str],
    mesh: Sequence[str],
    contract: Callable[..., Any] | None,
    inputs: Mapping[str, Any] | None,
    outputs: Any,
    errors: Callable[[str], ValueError],
) -> tuple[Any, Any]:
    """The specs of the inputs and outputs of `fn`: as declared, else from the contract.

    Takes the contract's inputs with names in `signature`, and the first form of its result.

    Errors: ValueError for missing specs, and for declared specs that do not match the specs of `contract`.
    """
    if contract is None and inputs is not None and outputs is not None:
        return inputs, outputs
    name = getattr(contract or fn, "__name__", "the function")
    stated = contract_of(contract or fn) or (read_contract(fn) if contract is None else None)
    if stated is None or not (stated.inputs or stated.outputs):
        lacking = next((each for each, specs in (("inputs", inputs), ("outputs", outputs)) if specs is None), None)
        if lacking is None:
            raise errors(f"has contract={name}, whose signature states no specs; drop it")
        raise errors(f"has no {lacking}, and the signature of {name} states no contract; pass {lacking}")
    if inputs is None:
        inputs = {key: spec for key, spec in stated.inputs.items() if key in signature}
        if not inputs:
            raise errors(
                f"takes ({', '.join(signature)}), but the contract of {name} has only "
                f"({', '.join(stated.inputs)}); rename the arguments, or pass inputs"
            )
    if outputs is None and not stated.outputs:
        raise errors(f"has no outputs, and the signature of {name} states none; pass outputs")
    meaning = Meaning() if contract is None else _meaning(stated, name, contract, inputs, outputs, mesh, errors)
    if outputs is None:
        form = tuple(instance_of(spec, meaning) for spec in stated.outputs[0])
        outputs = form[0] if len(form) == 1 else form
    return inputs, outputs


def _meaning(
    stated: Contract,
    name: str,
    contract: Callable[..., Any],
    inputs: Mapping[str, Any],
    outputs: Any,
    mesh: Sequence[str],
    errors: Callable[[str], ValueError],
) -> Meaning:
    """The scheme's names for the contract's dims and axes. Errors: ValueError if the specs do not match it."""
    own_inputs = {path: spec for path, spec in flat(inputs).items() if isinstance(spec, str)}
    returned = outputs.values() if isinstance(outputs, Mapping) else (outputs,) if isinstance(outputs, str) else outputs
    own_outputs = None if outputs is None else [spec for spec in returned if isinstance(spec, str)]
    meaning = meaning_of(stated, own_inputs, own_outputs, mesh)
    if meaning is None:
        own = ", ".join(f'{path} "{spec}"' for path, spec in own_inputs.items())
        result = "" if own_outputs is None else " -> " + ", ".join(f'"{spec}"' for spec in own_outputs)
        line = " ".join(spec_line(contract).split())
        raise errors(f"has {own}{result}, which does not match the contract of {name}: {line}")
    return meaning
