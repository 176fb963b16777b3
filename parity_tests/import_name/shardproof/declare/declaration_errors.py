"""Collects the errors of one declaration and raises them in one exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class DeclarationErrors:
    """`errors(text)` creates an exception for one error; errors raised in `with errors.collected()` are collected.

    An error raised outside such a block ends the declaration, because later checks depend on it.
    """

    def __init__(self, scheme: str) -> None:
        self.title = f"scheme '{scheme}': "
        self.texts: list[str] = []

    def __call__(self, text: str) -> ValueError:
        return ValueError(self.title + text)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect an error raised in the block; it ends the block."""
        try:
            yield
        except ValueError as error:
            self.texts.append(str(error).removeprefix(self.title))

    def of(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `check(*arguments, self)`; None if it raises an error, which is collected."""
        with self.collected():
            return check(*arguments, self)

    def raise_all(self) -> None:
        """Errors: ValueError with the text of a single error, or with a list of several."""
        texts = list(dict.fromkeys(self.texts))
        if len(texts) == 1:
            raise self(texts[0])
        if texts:
            raise self("".join([f"{len(texts)} errors", *(f"\n  {i}. {text}" for i, text in enumerate(texts, 1))]))
