"""pipelining.csv_schedule: it reads the files that it and torch write, and each error names a cell."""

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity_tests.pipelining.drawn_orders import named_orders, own_orders
from parity_tests.pipelining.written_orders import dumped, with_communication
from torch_impl.pipelining import read_csv, simulate
from torch_impl.pipelining.order import computations, parse_action

CELL = re.compile(r"^pipeline_parallel_schedule_csv='[^']*' row [1-9]\d*, column [1-9]\d*: ")


def read(text, **sizes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_csv(path, **sizes)


@given(named_orders(ranks=range(1, 5), max_microbatches=8))
def test_a_written_schedule_is_read_again(sample):
    _, p, n, _, order, placed = sample
    schedule = read(dumped(order), pp_size=p, n_microbatches=n)
    assert (schedule.order, schedule.stage_to_rank, schedule.n_microbatches) == (order, placed, n)
    assert not schedule.has_communication


@given(own_orders(for_torch=True))
def test_any_possible_order_is_read(sample):
    order, placed, n = sample
    schedule = read(dumped(order))
    assert (schedule.order, schedule.stage_to_rank, schedule.n_microbatches) == (order, placed, n)
    assert schedule.stages_per_rank == [placed.count(rank) for rank in range(len(order))]


@given(named_orders(ranks=range(1, 5), max_microbatches=6))
def test_torchs_full_schedule_is_read_and_takes_as_long(sample):
    name, p, n, _, order, placed = sample
    full_order = with_communication(order, placed, n)
    schedule = read(dumped(full_order), pp_size=p, n_microbatches=n)
    assert (schedule.order, schedule.stage_to_rank) == (full_order, placed)
    assert schedule.has_communication
    timed, computed_alone = simulate(full_order, placed), simulate(order, placed)
    if name == "DualPipeV":  # torch sends the results of a pair when both of its actions are done
        assert timed.makespan >= computed_alone.makespan
    else:
        assert timed == computed_alone


def test_blanks_wait_and_lines_may_end_in_any_way():
    plain = read("0F0,,0B0\n,1F0,1B0\n")
    first, second = ([parse_action(cell) for cell in row] for row in (("0F0", "", "0B0"), ("", "1F0", "1B0")))
    assert plain.order == [first, second]
    for text in (b"\xef\xbb\xbf0F0,,0B0\r\n,1F0,1B0", '"0F0",,0B0\n, 1F0 ,1B0\n\n,\n'):
        assert read(text) == plain


FAULTS = [
    ("0F0,0B0,x", "row 1, column 3: 'x' is not an action; write <stage><kind><micro-batch>"),
    ("rank 0\n0F0,0B0", "row 1, column 1: 'rank 0' is not an action"),
    ("0F0,0B-1", "row 1, column 2: '0B-1' is not an action"),
    ("0F0;0B0", "row 1, column 1: '0F0;0B0' is not an action"),
    ("0f0,0B0", "row 1, column 1: '0f0' is not an action"),
    ("0F,0B0", "row 1, column 1: '0F' is not an action"),
    ("0UNSHARD0,0F0,0B0", "row 1, column 1: '0UNSHARD0' is not an action"),
    ("(0F0;0SEND_F0)OVERLAP_F_B,0B0", "row 1, column 1: '(0F0;0SEND_F0)OVERLAP_F_B' is not an action"),
    ("0F0,0B0,0F0\n1F0,1B0", "row 1, column 3: '0F0' occurs a second time"),
    ("0F0,0B0\n1F0,1B0,1F0", "row 2, column 3: '1F0' occurs a second time"),
    ("0F0,0B0\n1B0,1F0", "row 2, column 1: '1B0' comes before '1F0'"),
    ("0F0,0W0,0I0", "row 1, column 2: '0W0' comes before '0I0'"),
    ("0F0,0I0,0B0,0W0", "row 1, column 3: '0B0' occurs beside '0I0'"),
    ("0F0,0B0\n1F0", "row 2, column 2: the rank ends without '1B0'"),
    ("0F0,0I0", "row 1, column 3: the rank ends without '0W0'"),
    ("0F0,0B0,0F1,0B1\n1F0,1B0", "row 2, column 3: the rank ends without '1F1'"),
    ("0F0,0B0,1F0\n1B0", "row 2, column 1: '1B0' is on rank 1, but stage 1 is on rank 0"),
    ("0F1,0F0,0B0,0B1", "row 1, column 1: '0F1' comes before '0F0' on the last stage"),
    ("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1", "row 2, column 1: '1F1' comes before '1F0' on the last stage"),
    ("0F0,0B0\n2F0,2B0", "row 2, column 1: '2F0' is of stage 2, but no rank has stage 1"),
    ("0F0,0B0\n\n1F0,1B0", "row 2, column 1: the row has no action; every rank needs a stage"),
    ("0F0,0B0,1F1,1B1,1F0,1B0,0F1,0B1", "row 1, column 2: deadlock: rank 0 waits in '0B0'"),
    ("", "row 1, column 1: is missing"),
    (b"\xff\xfe0", "row 1, column 1: not CSV text"),
]
SENT = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
TWO = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
COMMUNICATION_FAULTS = [
    (SENT, ",0SEND_F0", "", "row 1, column 4: the rank ends without '0SEND_F0'"),
    (SENT, "1RECV_F0,", "", "row 2, column 4: the rank ends without '1RECV_F0'"),
    (SENT, ",1SEND_B0", "", "row 2, column 4: the rank ends without '1SEND_B0'"),
    (SENT, "0F0,0SEND_F0", "0SEND_F0,0F0", "row 1, column 1: '0SEND_F0' comes before '0F0'"),
    (SENT, "1RECV_F0,1F0", "1F0,1RECV_F0", "row 2, column 1: '1F0' comes before '1RECV_F0'"),
    (SENT, "0RECV_B0,0B0", "0B0,0RECV_B0", "row 1, column 3: '0B0' comes before '0RECV_B0'"),
    (SENT, "0SEND_F0", "0SEND_F0,0SEND_F0", "row 1, column 3: '0SEND_F0' occurs a second time"),
    (SENT, "1B0", "1SEND_F0,1B0", "row 2, column 3: '1SEND_F0' has no other end on another rank"),
    (SENT, "0F0,", "0RECV_F0,0F0,", "row 1, column 1: '0RECV_F0' has no other end on another rank"),
    (SENT, "0F0,", "0RESHARD,0F0,", "row 1, column 1: '0RESHARD' comes where stage 0 is not gathered"),
    (SENT, "0F0,", "0UNSHARD,0UNSHARD,0F0,", "row 1, column 2: '0UNSHARD' comes where stage 0 is gathered already"),
    (SENT, "0F0,", "0UNSHARD,0F0,0RESHARD,", "row 1, column 6: '0B0' comes where stage 0 is not gathered"),
    (SENT, "0B0", "0REDUCE_GRAD,0B0", "row 1, column 5: '0B0' comes after '0REDUCE_GRAD'"),
    (SENT, "0B0", "0B0,0REDUCE_GRAD,0REDUCE_GRAD", "row 1, column 6: '0REDUCE_GRAD' occurs a second time"),
    (TWO, "0F0,0SEND_F0,0F1,0SEND_F1", "0F0,0F1,0SEND_F1,0SEND_F0", "row 2, column 1: '1RECV_F0' comes where rank 0"),
    (TWO, "1B0,1SEND_B0,1B1,1SEND_B1", "1B0,1B1,1SEND_B1,1SEND_B0", "row 1, column 5: '0RECV_B0' comes where rank 1"),
    (TWO, "0SEND_F1,0RECV_B0,0B0,", "0RECV_B0,0B0,0SEND_F1,", "row 1, column 5: deadlock: rank 0 waits in '0B0'"),
]

HALVED = SENT.replace("1B0,1SEND_B0", "1I0,1SEND_B0,1W0").replace("0RECV_B0,0B0", "0RECV_B0,0I0,0W0")
COMMUNICATION_FAULTS += [
    (HALVED, "1I0,1SEND_B0", "1SEND_B0,1I0", "row 2, column 3: '1SEND_B0' comes before '1I0'"),
    (HALVED, "0RECV_B0,0I0", "0I0,0RECV_B0", "row 1, column 3: '0I0' comes before '0RECV_B0'"),
]


@pytest.mark.parametrize("text", [SENT, TWO, HALVED, "0F0,0I0,0W0", "0F0,,0B0,0F1,0B1\n1F0,1B0,1F1,,1B1"])
def test_a_file_without_a_mistake_is_read_cell_by_cell(text):
    assert read(text).order == [[parse_action(cell) for cell in row.split(",")] for row in text.splitlines()]


@pytest.mark.parametrize(("text", "words"), FAULTS)
def test_an_error_names_its_cell(text, words):
    with pytest.raises(ValueError, match=CELL) as rejection:
        read(text)
    assert words in str(rejection.value)


@pytest.mark.parametrize(("text", "old", "new", "words"), COMMUNICATION_FAULTS)
def test_an_error_of_communication_names_its_cell(text, old, new, words):
    assert read(text).has_communication
    assert text.count(old) == 1
    with pytest.raises(ValueError, match=CELL) as rejection:
        read(text.replace(old, new))
    assert words in str(rejection.value)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pp_size": 3}, "row 3, column 1: is missing; there must be one row for each of pp_size=3 ranks"),
        ({"pp_size": 1}, "row 2, column 1: is one row too many; there must be one for each of pp_size=1 ranks"),
        ({"n_microbatches": 2}, "row 1, column 3: the rank ends without '0F1'"),
    ],
)
def test_a_file_for_other_sizes_is_reported_with_its_cell(sizes, words):
    with pytest.raises(ValueError, match=CELL) as rejection:
        read("0F0,0B0\n1F0,1B0", **sizes)
    assert words in str(rejection.value)


def test_a_missing_file_is_reported_with_its_argument(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pipeline_parallel_schedule_csv='.*none.csv' does not exist"):
        read_csv(tmp_path / "none.csv")
    for path in (tmp_path, "no\0path"):
        with pytest.raises(ValueError, match=CELL):
            read_csv(path)


@given(st.data(), named_orders(ranks=range(1, 4), max_microbatches=4), st.booleans())
def test_an_edited_file_is_a_schedule_or_rejected_with_a_cell(data, sample, has_communication):
    _, p, n, _, order, placed = sample
    rows = with_communication(order, placed, n) if has_communication else order
    cells = [["" if action is None else str(action) for action in actions] for actions in rows]
    for _ in range(data.draw(st.integers(1, 2))):
        edit_cells(cells, data)
    text = "\n".join(",".join(row) for row in cells)
    try:
        schedule = read(text, pp_size=p, n_microbatches=n)
    except ValueError as rejection:
        assert CELL.match(str(rejection))
    else:
        every = [computations(actions) for actions in schedule.order]
        assert [sorted(actions) for actions in every] == [sorted(set(actions)) for actions in every]
        forwards = sorted(a[::2][:2] for actions in every for a in actions if a.kind == "F")
        assert forwards == [(s, m) for s in range(len(schedule.stage_to_rank)) for m in range(n)]


def edit_cells(cells, data):
    """One edit: two cells change places, or one cell is removed, repeated, moved or replaced."""
    row = cells[data.draw(st.integers(0, len(cells) - 1))]
    if not row:
        return
    at = data.draw(st.integers(0, len(row) - 1))
    kind = data.draw(st.sampled_from(["swap", "drop", "twice", "other", "move"]))
    if kind == "swap":
        to = data.draw(st.integers(0, len(row) - 1))
        row[at], row[to] = row[to], row[at]
    elif kind == "drop":
        row.pop(at)
    elif kind == "twice":
        row.insert(data.draw(st.integers(0, len(row))), row[at])
    elif kind == "move":
        cells[data.draw(st.integers(0, len(cells) - 1))].append(row.pop(at))
    else:
        row[at] = data.draw(st.sampled_from(["", "0F0", "1B0", "0I0", "0W0", "9F9", "1RECV_F0", "0UNSHARD", "F", "-"]))
