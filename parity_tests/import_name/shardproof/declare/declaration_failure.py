"""A declaration that turns out unusable when a case runs: a layout or the cost of a scheme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

from shardproof.endings.raised import first_line_of


class DeclarationFailure(ValueError):
    """A layout or the cost of a scheme raised, or returned an invalid value. Other schemes are not affected."""


def raised_by(what: str, error: BaseException) -> DeclarationFailure:
    """`layout 'zigzag' raised NameError at my_scheme.py:7: name 'n' is not defined`."""
    frames = extract_tb(error.__traceback__)
    innermost = [frame for frame in frames if "site-packages" not in frame.filename or frame is frames[0]][-1]
    at = f"{Path(innermost.filename).name}:{innermost.lineno}"
    return DeclarationFailure(f"{what} raised {type(error).__name__} at {at}: {first_line_of(error)}")


@contextmanager
def of_scheme(name: str) -> Iterator[None]:
    """Prefix a failure of the declaration with the scheme's name."""
    try:
        yield
    except DeclarationFailure as failure:
        raise DeclarationFailure(f"scheme '{name}': {failure}") from failure.__cause__
