"""The versions that this release was tested with, and a sentence for each installed package that is newer."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

# The versions in constraints.txt, a file that is not installed with the package.
TESTED = {"torch": "2.13.0", "jax": "0.10.2", "transformers": "5.23.0"}


def newer() -> list[str]:
    """`torch 2.14.1 is newer than 2.13.0, with which this release was tested`, for each newer package."""
    sentences = []
    for name, tested in TESTED.items():
        installed = installed_release(name)
        if installed and _numbers(installed) > _numbers(tested):
            sentences.append(f"{name} {installed} is newer than {tested}, with which this release was tested")
    return sentences


@cache  # every report calls this, and one look-up takes 20 ms
def installed_release(name: str) -> str:
    """The release of a package, empty where it is not installed: transformers is an extra."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """`2.14.0.dev20261128` as (2, 14, 0): a nightly counts as its release."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", text)[0].split(".")))  # pyright: ignore[reportOptionalSubscript]
