"""The mistakes of one declaration, all of them in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Mistakes:
    """`mistakes(text)` makes the exception of one mistake; those raised in `with mistakes.collected()` are collected.

    What cannot go on after a mistake raises it outside of such a block, which ends the declaration.
    """

    def __init__(self, scheme: str) -> None:
        self.title = f"scheme '{scheme}': "
        self.texts: list[str] = []

    def __call__(self, text: str) -> ValueError:
        return ValueError(self.title + text)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A mistake in the block is noted, and ends the block."""
        try:
            yield
        except ValueError as error:
            self.texts.append(str(error).removeprefix(self.title))

    def of(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """What a check returns that takes the mistakes last; None after the first mistake that it raises."""
        with self.collected():
            return check(*arguments, self)

    def raise_all(self) -> None:
        """Errors: ValueError, of one mistake as it is, of several as a list."""
        texts = list(dict.fromkeys(self.texts))
        if len(texts) == 1:
            raise self(texts[0])
        if texts:
            raise self("".join([f"{len(texts)} mistakes", *(f"\n  {i}. {text}" for i, text in enumerate(texts, 1))]))
