"""Find the functions of production that a traced step runs: a bug anywhere else is unseen without being injected.

A bug is reached if a function with one of its lines runs on any rank, forward or backward. A line outside of all
functions is reached where its file is imported.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, patched_text
from parity_tests.evidence.injected_bugs.trials import CodePlace, executed_functions
from shardproof.training.body import trace as body
from shardproof.training.run import Run
from shardproof.training.traced import case_of


def functions_run(run: Run) -> frozenset[CodePlace]:
    """Every function of production that the step of a run calls."""
    return executed_functions(body, [case_of(run, "lockstep")])


def is_reached(bug: InjectedBug, called_places: frozenset[CodePlace]) -> bool:
    """Whether a step that ran these functions can see the bug. Errors: StaleBug."""
    patched = patched_text(bug)
    owners = {owner(patched.file, line) for line in patched.replaced_lines}
    imported = {name.replace(".", "/") for name in sys.modules if name.startswith("torch_impl.")}
    is_imported = patched.file.removesuffix(".py").removesuffix("/__init__") in imported
    return any(is_imported if begin is None else (patched.file, begin) in called_places for begin in owners)


def owner(file: str, line: int) -> int | None:
    """The line where the innermost function around a line begins; None outside of all functions."""
    inside = [begin for begin, start, end in _functions(ROOT / file) if start <= line <= end]
    return max(inside, default=None)


@cache
def _functions(path: Path) -> tuple[tuple[int, int, int], ...]:
    """(where it begins, first and last line of its body) of each function."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return tuple((_begin(node), node.body[0].lineno, node.end_lineno or node.lineno) for node in functions)


def _begin(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
