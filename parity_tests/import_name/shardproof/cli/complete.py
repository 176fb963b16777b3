"""Shell completion of an unfinished word. Nothing slow is loaded, because each key press starts a process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from shardproof.places import component_folders

DECLARED = re.compile(r"^@scheme\($.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)
AXES, SIZES = ("tp", "cp", "dp", "pp", "ep"), (2, 4)


def targets(incomplete: str) -> list[str]:
    """Schemes that the parity tests declare with the decorator, and Python files of this folder."""
    declared = [
        name
        for folder in component_folders()
        for file in folder.glob("test_*.py")
        for name in DECLARED.findall(file.read_text(encoding="utf-8"))
    ]
    return _begin(incomplete, [*_files("*.py"), *sorted(declared)])


def priced(incomplete: str) -> list[str]:
    """Named comparisons, then schemes and files."""
    return [*_begin(incomplete, ("attention", "logprob", "mamba")), *targets(incomplete)]


def files(incomplete: str) -> list[str]:
    return _begin(incomplete, _files("*.py"))


def replays(incomplete: str) -> list[str]:
    return _begin(incomplete, _files("replay_*.py"))


def schedules(incomplete: str) -> list[str]:
    """Schedules by name, in upper or lower case, and CSV files of this folder."""
    from torch_impl.pipelining.named_schedules import RULES

    rule_names = [incomplete + name[len(incomplete) :] for name in RULES if name.lower().startswith(incomplete.lower())]
    return [*rule_names, *_begin(incomplete, _files("*.csv"))]


def meshes(incomplete: str) -> list[str]:
    """The last size of a list such as dp=2,cp=; axes that it already has are not offered."""
    return _sizes(incomplete, AXES)


def training_meshes(incomplete: str) -> list[str]:
    from shardproof.training import run

    return _sizes(incomplete, ("dp", *run.AXES))


def engines(incomplete: str) -> list[str]:
    from shardproof.declare.case import ENGINES

    return _begin(incomplete, ENGINES)


def profiles(incomplete: str) -> list[str]:
    from shardproof.draw.profiles import EXAMPLES

    return _begin(incomplete, EXAMPLES)


def dtypes(incomplete: str) -> list[str]:
    from shardproof.declare.case import DTYPES

    return _begin(incomplete, DTYPES)


def of_run(constant: str) -> Callable[[str], list[str]]:
    """The values of a setting of the training run, by the name of the constant that lists them."""

    def values(incomplete: str) -> list[str]:
        from shardproof.training import run

        return _begin(incomplete, getattr(run, constant))

    return values


def _sizes(incomplete: str, axes: tuple[str, ...]) -> list[str]:
    done, comma, last = incomplete.rpartition(",")
    axes_before = {part.partition("=")[0] for part in done.split(",")}
    offered = [f"{axis}={size}" for axis in axes if axis not in axes_before for size in SIZES]
    return [done + comma + size for size in _begin(last, offered)]


def _files(pattern: str) -> list[str]:
    return sorted(path.name for path in Path().glob(pattern))


def _begin(incomplete: str, offered: object) -> list[str]:
    return [each for each in offered if each.startswith(incomplete)]  # pyright: ignore
