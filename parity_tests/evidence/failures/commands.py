"""Kinds of failure of a whole command: files that could hide a verdict, each verified by a new process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BEGUN = "begun"  # a file to which the first file of schemes writes when it is imported
HEAD = f"""\
import time

with open({BEGUN!r}, "a") as file:
    file.write(f"{{time.monotonic()}}\\n")

import ctypes
import os
import signal
import sys

from shardproof import scheme, values

def declare(fn, **how):
    right = dict(reference=lambda x: 2.0 * x, mesh={{"tp": (2, 4)}}, inputs={{"x": "b/tp"}}, outputs="b/tp",
                 draw={{"x": values("normal")}}, dtypes=("float32",), dims={{"b": (8,)}})
    return scheme(**right | how)(fn)
"""
WRONG = """
def wrong(mesh, x):
    return 3 * x

declare(wrong)
"""
LEAVES = """
def leaves(mesh, x):
    ctypes.CDLL(None)._exit(0)

declare(leaves)
"""
KILLED = """
def killed(mesh, x):
    if mesh.rank("tp") == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * x

declare(killed)
"""
CLOSES = """
def closes(mesh, x):
    sys.__stdout__.close()
    sys.__stderr__.close()
    return 3 * x

declare(closes)
"""
NAN = """
def without_a_number(mesh, x):
    return float("nan") * x

declare(without_a_number, reference=lambda x: float("nan") * x)
"""
WITH_HELPER = """
from helper import FACTOR

def scaled(mesh, x):
    return FACTOR * x

declare(scaled)
"""


@dataclass(frozen=True)
class Kind:
    """The files of a command with their texts, and the environment that it is started in."""

    files: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> list[str]:
        """The files that declare schemes."""
        return [file for file, text in self.files.items() if "declare(" in text]


COMMANDS = {
    "replaces_sys_exit": Kind({"kind.py": f"{HEAD}\nsys.exit = lambda *status: None\n{WRONG}"}),
    "closes_standard_output": Kind({"kind.py": f"{HEAD}\nsys.stdout.close()\n{WRONG}"}),
    "closes_the_original_output": Kind({"kind.py": f"{HEAD}{CLOSES}"}),
    "rank_0_is_killed_beside_a_wrong_scheme": Kind({"kind.py": f"{HEAD}{WRONG}{KILLED}"}),
    "leaves_with_a_rank_in_the_environment": Kind({"kind.py": f"{HEAD}{LEAVES}"}, {"RANK": "0"}),
    "reference_is_nan_in_every_case": Kind({"kind.py": f"{HEAD}{NAN}"}),
    "two_helpers_of_one_name": Kind(
        {
            "one/kind.py": f"{HEAD}{WITH_HELPER}",
            "one/helper.py": "FACTOR = 2\n",
            "two/kind.py": f"{HEAD}{WITH_HELPER.replace('scaled', 'rescaled')}",
            "two/helper.py": "FACTOR = 3\n",
        }
    ),
}
