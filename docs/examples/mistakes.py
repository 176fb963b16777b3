"""Six mistakes in my_scheme.py, each an exact replacement in its text, and what the report must say of it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardproof import schemes_of_file, verify, verify_case

RIGHT = Path(__file__).with_name("my_scheme.py")


@dataclass(frozen=True)
class Mistake:
    """`old` stands once in the file and becomes `new`; `at` is the text of the line that the report points to."""

    title: str
    old: str
    new: str
    says: tuple[str, ...]
    at: str | None = None
    engine: str = "lockstep"
    patience: float | None = None  # seconds without progress before one case is given up; None: search many cases

    @property
    def source(self) -> str:
        text = RIGHT.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"mistake '{self.title}' is stale: {self.old!r} is not once in {RIGHT.name}")
        return text.replace(self.old, self.new)

    @property
    def place(self) -> str | None:
        """`my_scheme.py:50`, the line of `at` in the wrong file."""
        if self.at is None:
            return None
        lines = self.source.splitlines()
        (number,) = [n for n, line in enumerate(lines, 1) if self.at in line]
        return f"{RIGHT.name}:{number}"

    @property
    def difference(self) -> str:
        """The line as it is in the right file and in the wrong one."""
        pairs = zip(RIGHT.read_text().splitlines(), self.source.splitlines(), strict=False)
        old, new = next(pair for pair in pairs if pair[0] != pair[1])
        return f"- {old.strip()}" + (f"\n+ {new.strip()}" if self.new else "")

    def printed(self) -> str:
        """What `shardproof verify` says of the wrong file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / RIGHT.name
            file.write_text(self.source)
            (scheme,) = schemes_of_file(str(file))
            if self.patience is None:
                report = verify(scheme, replay_folder=folder)
            else:
                case = scheme.case(cp=1, tp=2, b=1, s=4, d=2, v=4, dtype="float32", engine=self.engine)
                report = verify_case(scheme, case.replace(schedule=0), quiet_s=self.patience)  # ranks in turn
            return str(report).replace(f"{folder}/", "")


DROPPED = Mistake(
    "a dropped all-reduce in the backward",
    old="        dist.all_reduce(gradient, group=ctx.group)\n",
    new="",
    says=("gradient missing a sum over tp: the ranks' gradients add up to the reference",),
)
OFFSET = Mistake(
    "a wrong shard offset",
    old='first = mesh.rank("tp") * logits.shape[-1]',
    new='first = mesh.rank("tp") * logits.shape[-1] + 1',
    says=("a term sits 1 place off along v: an offset is wrong by 1",),
)
LAYOUT = Mistake(
    "a layout that is not undone",
    old="return logprob[:, order]",
    new="return logprob",
    says=("same values in another order: a layout is not undone", "s is still in dual_chunk_swap order over cp"),
)
COLLECTIVE = Mistake(
    "a mismatched collective",
    old="row_max = logits.detach().amax(-1)",
    new='row_max = logits.detach().amax(-1)[:, mesh.rank("tp") :]',
    says=(
        "collective mismatch: shapes differ, [1, 4] and [1, 3]",
        "rank 0 in all_reduce float32[1, 4] MAX (group tp, #0)",
        "rank 1 in all_reduce float32[1, 3] MAX (group tp, #0)",
    ),
    at="dist.all_reduce(row_max",
    patience=30.0,
)
RAISES = Mistake(
    "a rank that raises",
    old='first = mesh.rank("tp") * logits.shape[-1]',
    new='first = [0][mesh.rank("tp")] * logits.shape[-1]',
    says=("raised: rank 1 raised IndexError: list index out of range", "rank 0 waits in all_reduce float32[1, 4] SUM"),
    at="score = all_reduce",
    patience=30.0,
)
HANGS = Mistake(
    "a rank that hangs",
    old='first = mesh.rank("tp") * logits.shape[-1]',
    new='first = next(n for n in iter(int, 1) if n) if mesh.rank("tp") else 0',
    says=("stalled: nothing has moved for", "rank 1 computes", "rank 0 waits in all_reduce float32[1, 4] SUM"),
    at="score = all_reduce",
    engine="gloo",
    patience=1.5,
)
MISTAKES = (DROPPED, OFFSET, LAYOUT, COLLECTIVE, RAISES, HANGS)
