"""A mutant: one place of production with another text, made by a rule and not by hand."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parity_tests.evidence.injected_bugs.injected_bug import PRODUCTION, ROOT, PatchedFile

TOP_LEVEL = re.compile(rb"^[^\s)\]}#]", re.MULTILINE)  # where a statement of a module begins


@dataclass(frozen=True)
class Mutant:
    """`old`, from byte `start` on of a file, becomes `new`; `kind` is the rule, `symbol` the function around it."""

    file: str
    symbol: str
    kind: str
    start: int
    old: str
    new: str
    first_line: int
    last_line: int

    @property
    def component(self) -> str:
        """The folder of production that it stands in."""
        return self.file.removeprefix(f"{PRODUCTION}/").partition("/")[0]

    @property
    def stop(self) -> int:
        """The byte after the last of `old`."""
        return self.start + len(self.old.encode())

    @property
    def key(self) -> str:
        """The mutant's identity from one run to the next, as long as the function or class around it is the same."""
        text = (ROOT / self.file).read_bytes()
        starts = [match.start() for match in TOP_LEVEL.finditer(text)]
        begin = max((start for start in starts if start <= self.start), default=0)
        end = min((start for start in starts if start >= self.stop), default=len(text))
        identity = "\0".join((self.file, self.kind, str(self.start - begin), self.new)).encode() + text[begin:end]
        return hashlib.sha256(identity).hexdigest()[:12]

    @property
    def change(self) -> str:
        """`x + 1 -> x - 1`, in one line."""
        return f"{' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    @property
    def place(self) -> str:
        """The line with its change in it, `y = x «+ 1 -> - 1»`, which tells apart equal changes of one function."""
        text = (ROOT / self.file).read_bytes()
        before = text[: self.start].decode().rpartition("\n")[2].lstrip()
        after = text[self.stop :].decode().partition("\n")[0].rstrip()
        return f"{before}«{self.change}»{after}"

    @property
    def patched(self) -> PatchedFile:
        """The file with the change, and the lines that are changed."""
        return PatchedFile(self.file, changed(self.file, [self]).decode(), self.first_line, self.last_line)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `Mutant(**record)` reads it."""
        return asdict(self)


def changed(file: str, mutants: Sequence[Mutant]) -> bytes:
    """The text of a file with the changes of all these mutants, which must not overlap."""
    text = (ROOT / file).read_bytes()
    for mutant in sorted(mutants, key=lambda each: each.start, reverse=True):
        text = text[: mutant.start] + mutant.new.encode() + text[mutant.stop :]
    return text
