"""Parity of pipelining.schedule: every schedule against accumulation on one device, bit by bit."""

import logging
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.pipelining.drawn_orders import legal_sizes, named_orders, own_orders
from parity_tests.pipelining.perceptron import (
    PER_MICROBATCH,
    accumulated,
    last_backwards,
    placement,
    stepped,
    written,
)
from parity_tests.pipelining.test_csv_schedule import dumped, with_communication
from torch_impl.pipelining import schedule_order, simulate
from torch_impl.pipelining.rules import RULES

DTYPES = st.sampled_from(["float32", "float64"])


@pytest.fixture(autouse=True)
def quiet():
    """Few micro-batches are warned of, which is tested where it is meant."""
    logging.getLogger("torch_impl.pipelining.schedule").setLevel(logging.ERROR)
    yield
    logging.getLogger("torch_impl.pipelining.schedule").setLevel(logging.NOTSET)


def check_steps(ranks, order, placed, n, dtype, steps=1):
    """Losses, gradients and the executed order are those of one device and of the simulation."""
    losses, gradients = accumulated(len(placed), n, dtype, last_backwards(order), steps)
    found = {}
    for result in ranks.results:
        found |= result["gradients"]
    assert found == gradients
    assert [result["losses"] for result in ranks.results if result["losses"]] == [losses]
    timeline = simulate(order, placed)
    for rank, result in enumerate(ranks.results):
        assert result["executed"] == [[str(event.action) for event in timeline.of(rank)]] * steps


def case_of(p, dtype="float32", **options):
    return CaseSpec("pipeline", {"pp": p}, dtype=dtype, options=options)


@given(named_orders(ranks=range(1, 5), most=8), DTYPES, st.integers(1, 2))
def test_every_schedule_is_accumulation_bit_by_bit(drawn, dtype, steps):
    name, p, n, _, order, placed = drawn
    ranks = run(stepped, case_of(p, dtype, n=n, placed=placed, name=name, steps=steps))
    check_steps(ranks, order, placed, n, dtype, steps)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(RULES))
def test_the_fewest_microbatches_and_one_more(name, p):
    for _, n, v in legal_sizes(name, ranks=[p], chunks=(1, 2))[:2]:
        placed = placement(name, p, v)
        order = schedule_order(name, p, n, v)
        check_steps(run(stepped, case_of(p, n=n, placed=placed, name=name)), order, placed, n, "float32")


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name", list(RULES))
def test_every_schedule_in_processes(name, p):
    _, n, v = next(sizes for sizes in legal_sizes(name, ranks=[p], chunks=(2,)) if sizes[1] >= 2)
    placed = placement(name, p, v)
    ranks = run(stepped, case_of(p, n=n, placed=placed, name=name.upper()), engine="gloo")
    check_steps(ranks, schedule_order(name, p, n, v), placed, n, "float32")


@given(own_orders(for_torch=True), st.booleans(), DTYPES)
def test_any_file_is_accumulation_in_its_order(drawn, says_all, dtype):
    order, placed, n = drawn
    text = dumped(with_communication(order, placed, n) if says_all else order)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run(stepped, case_of(len(order), dtype, n=n, placed=placed, name=None, csv=written(folder, text)))
    check_steps(ranks, order, placed, n, dtype)


@given(named_orders(ranks=range(1, 4), most=6), st.booleans())
def test_a_dumped_schedule_gives_what_the_schedule_gives(drawn, says_all):
    name, p, n, _, order, placed = drawn
    text = dumped(with_communication(order, placed, n) if says_all else order)
    by_name = run(stepped, case_of(p, n=n, placed=placed, name=name))
    with tempfile.TemporaryDirectory() as folder:
        by_file = run(stepped, case_of(p, n=n, placed=placed, name=name, csv=written(folder, text)))
    assert by_file.results == by_name.results


@given(named_orders(ranks=range(2, 5), most=6))
def test_the_ledger_has_the_messages_of_the_simulation_in_their_order(drawn):
    name, p, n, _, order, placed = drawn
    ranks = run(stepped, case_of(p, n=n, placed=placed, name=name))
    timeline = simulate(order, placed)
    for rank in range(p):
        sent = [row.peer for row in ranks.ledger.of(rank) if row.op == "send" and row.shapes == ((PER_MICROBATCH, 3),)]
        assert sent == [peer for event in timeline.of(rank) if (peer := receiver(event.action, placed)) is not None]


def receiver(action, placed):
    """The rank that gets what an action makes."""
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < len(placed):
        return None
    peer = placed[action.stage + step]
    return None if peer == placed[action.stage] else peer
