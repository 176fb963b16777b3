"""Calls of public functions with one argument made wrong: is each rejected on every rank, by name, before anything is
sent?

Functions are called as their schemes call them. `hooked` must run before the components are imported: a function keeps
the contract that it was decorated with.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_impl.contract import contract as border

TENSORS: Mapping[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "a list": lambda x: x.tolist(),
    "a name": lambda x: "x",
    "sparse": lambda x: x.detach().to_sparse(),
    "float8": lambda x: x.detach().float().to(torch.float8_e4m3fn),
    "complex": lambda x: x.detach().to(torch.complex64),
    "on meta": lambda x: x.detach().to("meta"),
    "a dim more": lambda x: x.detach()[None],
    "a dim less": lambda x: x.detach().flatten()[0] if x.numel() else x.new_zeros(()),
    "of half the dtype": lambda x: x.detach().half() if not x.is_floating_point() else x.detach().long(),
    "bool": lambda x: x.detach().bool(),
    "uint16": lambda x: x.detach().long().clamp(min=0).to(torch.uint16),
    "a numpy array": lambda x: x.detach().float().numpy(),
    "a dim of size 0": lambda x: x.detach()[:0] if x.numel() else x.detach()[None],  # wrong on every rank
    "no elements": lambda x: x.new_zeros((0,) * (x.ndim + (x.numel() == 0))),
    "expanded": lambda x: x.detach().flatten()[:1].expand(x.numel()).reshape(x.shape),
    "not contiguous": lambda x: torch.stack([x.detach(), x.detach()], -1)[..., 0],
    "in inference mode": lambda x: _in_inference_mode(x),
    "not finite": lambda x: torch.full_like(x.detach(), torch.nan) if x.is_floating_point() else x.detach() + 2**30,
    "below 0": lambda x: -1 - x.detach().abs(),
    "nested": lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}
NUMBERS: Mapping[str, Callable[[Any], Any]] = {
    "None": lambda n: None,
    "a name": lambda n: "x",
    "nan": lambda n: float("nan"),
    "a list": lambda n: [n],
    "negative": lambda n: -3,
    "zero": lambda n: 0 if n else -3,  # wrong on every rank
    "infinite": lambda n: float("inf"),
    "huge": lambda n: 2**70,
    "a bool": lambda n: True,
    "a tensor of two": lambda n: torch.ones(2),
}
OTHERS: Mapping[str, Callable[[Any], Any]] = {
    "None": lambda value: None,
    "a number": lambda value: 7,
    "an object": lambda value: ANYTHING,
    "an empty list": lambda value: [],
    "a name": lambda value: "x",
    "a tensor": lambda value: torch.ones(2),
    "no member": lambda value: dist.GroupMember.NON_GROUP_MEMBER,
    "a function": lambda value: len,
}


def _in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


EXPECTED = (ValueError, TypeError, FileNotFoundError)  # by a caller of a library
ANYTHING = type("Anything", (), {"__repr__": lambda self: "anything"})()


@dataclass
class Call:
    """One wrong call: the function, the argument, how it is wrong; then the outcome on each rank."""

    function: str
    argument: str
    wrong: str
    arguments: tuple[str, ...] = ()  # all of the function's

    def __str__(self) -> str:
        return f"{self.function}({self.argument}: {self.wrong})"


@dataclass(frozen=True)
class Seen:
    """A call of a contracted function as a scheme makes it: its arguments by name, and the kinds of wrong ones."""

    function: str
    parameters: tuple[str, ...]
    wrongs: Mapping[str, tuple[str, ...]]


class Answered(Exception):
    """Ends a rank once the wrong call has answered."""

    def __init__(self, text: str) -> None:
        super().__init__(text)


class Hook:
    """Stands before the contracted functions of this process, on every rank."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] | None = None
        self.wrong: Call | None = None
        self.rows: Callable[[], int] = lambda: 0  # of the calling rank, in the ledger so far

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        if self.seen is not None and name not in self.seen and not re.search(r"\._[a-z]", name):
            signature = inspect.signature(function)
            parameters = tuple(
                key
                for key, each in signature.parameters.items()
                if key not in ("self", "ctx", "cls") and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            )
            bound = signature.bind(*args, **kwargs).arguments
            wrongs = {key: tuple(_wrongs(bound[key])) for key in parameters if key in bound}
            self.seen[name] = Seen(name, parameters, wrongs)
        if self.wrong is None or self.wrong.function != name:
            return function(*args, **kwargs)
        bound = inspect.signature(function).bind(*args, **kwargs)
        value = bound.arguments[self.wrong.argument]
        try:
            bound.arguments[self.wrong.argument] = _wrongs(value)[self.wrong.wrong](value)
        except Exception:  # a DTensor is not made sparse
            raise Answered("not called") from None
        before = self.rows()
        try:
            function(*bound.args, **bound.kwargs)
        except Exception as error:
            sent = " after a collective" if self.rows() > before else ""
            kind = next((each for each in EXPECTED if isinstance(error, each)), type(error))
            raise Answered(f"{kind.__name__}{sent}: {error}") from None
        raise Answered("accepted")


hook = Hook()


@contextmanager
def hooked() -> Iterator[None]:
    """While components are imported: each contracted function is called through the hook."""
    module = inspect.getmodule(inspect.unwrap(border))
    assert module is not None
    original = module._with_contract

    def with_hook(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        entry = original(function, name)

        @functools.wraps(entry)
        def called(*args: Any, **kwargs: Any) -> Any:
            return hook.call(entry, args, kwargs)

        return called

    vars(module)["_with_contract"] = with_hook
    try:
        yield
    finally:
        vars(module)["_with_contract"] = original


def _wrongs(value: Any) -> Mapping[str, Callable[[Any], Any]]:
    if isinstance(value, Tensor):
        return TENSORS
    return NUMBERS if isinstance(value, int | float) and not isinstance(value, bool) else OTHERS


def is_clear(answer: str, call: Call) -> bool:
    """Whether an answer names the argument, in an error that a caller of a library expects.

    It may name another argument, with which the wrong one does not agree.
    """
    names = "|".join(map(re.escape, (call.argument, *call.arguments)))
    is_named = re.search(rf"\b({names})\b", answer)
    is_expected = answer.startswith(tuple(f"{each.__name__}: " for each in EXPECTED))
    return answer == "accepted" or (is_expected and is_named is not None)


def answers(count: int, seed: int) -> Iterator[tuple[Call, list[str]]]:
    """`count` wrong calls, drawn from all that there are, each with the answer of every rank."""
    with hooked():
        from shardproof.declare.discover import built_in
        from shardproof.engines.program import Program

        schemes = built_in()
    from shardproof.draw.choosers import seeded_chooser
    from shardproof.draw.drawing import draw_case

    calls: list[tuple[Program, Any, Call]] = []
    known: set[str] = set()
    for scheme in schemes:
        if "lockstep" not in scheme.engines:
            continue
        program, case = Program.of(scheme), draw_case(scheme, seeded_chooser(seed), {}, seed=seed)
        hook.seen, hook.wrong = {}, None
        _answer(program, case)
        new = [seen for name, seen in hook.seen.items() if name not in known]
        known |= hook.seen.keys()
        calls += [
            (program, case, Call(seen.function, argument, wrong, seen.parameters))
            for seen in new
            for argument, wrongs in seen.wrongs.items()
            for wrong in wrongs
        ]
    hook.seen = None
    random.Random(seed).shuffle(calls)
    for program, case, call in calls[:count]:
        hook.wrong = call
        yield call, _answer(program, case)


def _answer(program: Any, case: Any) -> list[str]:
    from shardproof.engines.engines import run
    from shardproof.engines.failure import RankFailure
    from shardproof.engines.lockstep import world

    def rows() -> int:
        here = world.here()
        return len(here.exchange.ledger.of(here.rank))

    def body(mesh: Any, case: Any) -> str:
        try:
            program(mesh, case)
        except Answered as answer:
            return str(answer)
        return "not called"

    hook.rows = rows
    try:
        return list(run(body, case, "lockstep", quiet_s=5.0).results)
    except RankFailure as failure:
        # A function that a `setup` calls answers there.
        answered = re.search(r"raised \S+\.Answered: (.*)", str(failure))
        return [answered[1] if answered else f"{failure.cause}: {failure}"]


def main(count: int, seed: int) -> None:
    """Print how many calls there were, and each that is not rejected clearly, with the answers of its ranks."""
    total, accepted = 0, 0
    for call, of_ranks in answers(count, seed):
        if of_ranks[0] == "not called":  # its result is kept from an earlier call
            continue
        total += 1
        accepted += of_ranks[0] == "accepted"
        # A sentence that shows the value may differ between ranks; whether it is accepted may not.
        is_accepted = {answer == "accepted" for answer in of_ranks}
        if len(is_accepted) > 1 or not all(is_clear(answer, call) for answer in of_ranks):
            print(json.dumps({"call": str(call), "answers": of_ranks}))
    print(json.dumps({"calls": total, "accepted": accepted}))


if __name__ == "__main__":
    from parity_tests.contract.bad_calls import main as of_module  # the hook of the module that components see

    of_module(int(sys.argv[1]), int(sys.argv[2]))
