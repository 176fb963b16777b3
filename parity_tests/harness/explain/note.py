"""A note: a sentence on one failing tensor, and what of it must be seen in other cases if it is true.

Most sentences are hypotheses. They fit the numbers of one case, and often several fit: one element is any multiple of
another. So a note carries its claims, which name what is the same in every case (a mesh axis, a dim, a layout) and
leave out what is not (the number, the places), and its scope, which says in what other cases they must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from parity_tests.harness.run.ledger import CallSite, Finding

OBSERVED = "observed"  # states what this one case shows; there is nothing to refute
CONTEXT = "context"  # a fact of this case, printed after the other notes
ACROSS_SIZES = "across sizes"  # holds at other sizes and values, on the same mesh
ACROSS_MESHES = "across meshes"  # holds on other meshes too
ROUNDING = "rounding"  # the error is one of rounding: it vanishes in a wider dtype


class Note(Finding):
    """A sentence with its scope and claims, and the calls that it blames.

    `claims` are alternatives, of which one is true: each with its words, which stand in the sentence joined by `or`.
    `implied` are weaker claims, that a case supports too if it supports this one. `applies` says of the evidence of
    another case whether it could show the pattern at all; by default each can.
    """

    claims: Mapping[str, str]
    implied: frozenset[str]
    applies: Callable[[Any], bool] | None
    scope: str

    def __new__(
        cls,
        text: str,
        scope: str = OBSERVED,
        claims: Mapping[str, str] | str = "",
        implied: Iterable[str] = (),
        applies: Callable[[Any], bool] | None = None,
        sites: Iterable[CallSite] = (),
    ) -> Self:
        note = super().__new__(cls, text, sites)
        note.scope, note.implied, note.applies = scope, frozenset(implied), applies
        note.claims = {claims: ""} if isinstance(claims, str) else dict(claims)
        return note

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.scope, self.claims, self.implied, self.applies, self.sites

    def supported_by(self, other_notes: Iterable[Note]) -> Note | None:
        """This note with the claims that one of the notes of another case supports, or None if there are none.

        >>> here = Note("off by 2 (= tp or cp)", ACROSS_MESHES, {"factor tp": "tp", "factor cp": "cp"})
        >>> str(here.supported_by([Note("off by 4 (= tp)", ACROSS_MESHES, {"factor tp": "tp"})]))
        'off by 2 (= tp)'
        """
        supported = {claim for other in other_notes for claim in (*other.claims, *other.implied)}
        claims = {claim: words for claim, words in self.claims.items() if claim in supported}
        if not claims:
            return None
        text = str(self)
        if len(claims) < len(self.claims):
            text = text.replace(" or ".join(self.claims.values()), " or ".join(claims.values()), 1)
        return Note(text, self.scope, claims, self.implied, self.applies, self.sites)

    def extended(self, words: str, sites: Iterable[CallSite] = ()) -> Note:
        """The same claims, with words after them, and the calls that these blame."""
        return Note(f"{self}{words}", self.scope, self.claims, self.implied, self.applies, (*self.sites, *sites))
