"""A note: a finding on one wrong tensor, with the claims that other cases must confirm.

Most notes are hypotheses: other cases could refute them. Several notes often fit the numbers of one case, because one
element is a multiple of any other. So a note has claims and a scope. The claims name only the parts that are equal in
every case: a mesh axis, a dim, a layout, but not most numbers and places. The scope is the cases in which the claims
must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from shardproof.engines.ledger import CallSite, Finding

# Scopes of facts about this case only, which no other case refutes.
OBSERVED = "observed"
CONTEXT = "context"  # facts on the run; `check_notes` puts them last
# Scopes of hypotheses: the cases in which their claims must hold.
ACROSS_SIZES = "across sizes"  # at other sizes and values, on the same mesh
ACROSS_MESHES = "across meshes"  # on other meshes too
ROUNDING = "rounding"  # in a wider dtype the error vanishes
HYPOTHESES = (ACROSS_SIZES, ACROSS_MESHES, ROUNDING)
IN_THIS_CASE = "in this case"  # phrase in a note on a number that another case refutes
NOT_DIFFERENTIABLE = "is not differentiable"  # phrase in a note on a plain collective
READ_TOO_EARLY = "read before its wait"  # phrase in a note on an asynchronous collective


class Note(Finding):
    """A finding on a tensor, with its scope and claims.

    `claims` are alternatives and one of them is true: each with its wording, which the note joins by `or`. `implied`
    are weaker claims: a case that supports this note supports them too. `applies(evidence)` tells whether another case
    could show the pattern at all; by default, every case can. `fits(evidence)` tells whether a case with other notes
    shows the pattern as well; by default, the claims decide. `sites` are the call sites that it blames.
    """

    claims: Mapping[str, str]
    implied: frozenset[str]
    applies: Callable[[Any], bool] | None
    fits: Callable[[Any], bool] | None
    scope: str

    def __new__(
        cls,
        text: str,
        scope: str = OBSERVED,
        claims: Mapping[str, str] | str = "",
        implied: Iterable[str] = (),
        applies: Callable[[Any], bool] | None = None,
        sites: Iterable[CallSite] = (),
        fits: Callable[[Any], bool] | None = None,
    ) -> Self:
        note = super().__new__(cls, text, sites)
        note.scope, note.implied, note.applies, note.fits = scope, frozenset(implied), applies, fits
        note.claims = {claims: ""} if isinstance(claims, str) else dict(claims)
        return note

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.scope, self.claims, self.implied, self.applies, self.sites, self.fits

    def supported_by(self, other_notes: Iterable[Note]) -> Note | None:
        """This note with the claims that another case's notes support, or None if there are none.

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
        return Note(text, self.scope, claims, self.implied, self.applies, self.sites, self.fits)

    def extended(self, words: str, sites: Iterable[CallSite] = ()) -> Note:
        """The note with more words at its end, and the call sites that they blame."""
        all_sites = (*self.sites, *sites)
        return Note(f"{self}{words}", self.scope, self.claims, self.implied, self.applies, all_sites, self.fits)
