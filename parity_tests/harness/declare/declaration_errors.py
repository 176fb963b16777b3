"""The errors of one declaration, all of them in one exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class DeclarationErrors:
    """`errors(text)` makes the exception of one error; those raised in `with errors.collected()` are collected.

    An error raised outside of such a block ends the declaration: nothing more can be checked after it.
    """

    def __init__(self, scheme: str) -> None:
        self.title = f"scheme '{scheme}': "
        self.texts: list[str] = []

    def __call__(self, text: str) -> ValueError:
        return ValueError(self.title + text)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """An error in the block is collected, and ends the block."""
        try:
            yield
        except ValueError as error:
            self.texts.append(str(error).removeprefix(self.title))

    def of(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """What `check(*arguments, self)` returns; None if it raises an error, which is collected."""
        with self.collected():
            return check(*arguments, self)

    def raise_all(self) -> None:
        """Errors: ValueError, with the text of one error as it is, with several as a list."""
        texts = list(dict.fromkeys(self.texts))
        if len(texts) == 1:
            raise self(texts[0])
        if texts:
            raise self("".join([f"{len(texts)} errors", *(f"\n  {i}. {text}" for i, text in enumerate(texts, 1))]))
