"""The table of a ledger by module: a module includes its parts, and stands before them."""

import pytest

from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.engines.ledger_table import table


def row(module, op, size, phase="fwd", rank=0, group="tp"):
    return LedgerRow(rank, 0, op, (0, 1), group, ("float32",), ((size // 4,),), size, size, phase=phase, module=module)


LEDGER = Ledger(
    [
        row("Net.a.up", "all_gather", 1024),
        row("Net.b", "all_reduce", 8, group="dp"),
        row("Net.a.down", "all_reduce", 16),
        row("Net.a.up", "reduce_scatter", 2048, "bwd"),
        row("Net.a.up", "all_gather", 1024),
        row("", "all_reduce", 4),
        row("Net.a", "all_reduce", 400, rank=1),
    ]
)


def test_modules_include_their_parts():
    assert table(LEDGER).splitlines() == [
        "module       phase  op              group  calls  bytes",
        "Net          fwd    all_gather      tp         2  2,048",
        "             fwd    all_reduce      dp         1      8",
        "             fwd    all_reduce      tp         1     16",
        "             bwd    reduce_scatter  tp         1  2,048",
        "  a          fwd    all_gather      tp         2  2,048",
        "             fwd    all_reduce      tp         1     16",
        "             bwd    reduce_scatter  tp         1  2,048",
        "    up       fwd    all_gather      tp         2  2,048",
        "             bwd    reduce_scatter  tp         1  2,048",
        "    down     fwd    all_reduce      tp         1     16",
        "  b          fwd    all_reduce      dp         1      8",
        "(no module)  fwd    all_reduce      tp         1      4",
    ]


def test_one_of_several_ranks_is_chosen():
    assert [line.split()[-1] for line in table(LEDGER, 1).splitlines()] == ["bytes", "400", "400"]
    with pytest.raises(ValueError, match=r"^ledger_table: rank 2 has issued nothing; there are 0, 1$"):
        table(LEDGER, 2)


def test_an_empty_ledger_is_a_sentence():
    assert table(Ledger()) == "no collectives"


def test_a_ledger_is_printed_as_its_table():
    assert str(LEDGER) == table(LEDGER) and str(Ledger()) == "no collectives"
