"""The versions that this release was tested with, and a sentence for each that is newer here."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# Those of constraints.txt, which is not installed.
TESTED = {"torch": "2.13.0", "jax": "0.10.2", "transformers": "5.23.0"}


def newer() -> list[str]:
    """`torch 2.14.1 is newer than 2.13.0, with which this release was tested`; empty where nothing is newer."""
    sentences = []
    for name, tested in TESTED.items():
        try:
            installed = version(name).partition("+")[0]
        except PackageNotFoundError:  # transformers is an extra
            continue
        if _numbers(installed) > _numbers(tested):
            sentences.append(f"{name} {installed} is newer than {tested}, with which this release was tested")
    return sentences


def _numbers(text: str) -> tuple[int, ...]:
    """`2.14.0.dev20261128` as (2, 14, 0): a nightly counts as its release."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", text)[0].split(".")))  # pyright: ignore[reportOptionalSubscript]
