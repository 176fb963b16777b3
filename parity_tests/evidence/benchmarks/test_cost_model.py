"""A sheet fitted to measured messages predicts their times, and the table has a ratio for each op and size."""

from parity_tests.evidence.benchmarks import cost_model as measured

TIMES = {"send": {4096: 3e-3, 16384: 6e-3}, "all_reduce": {4096: 1.2e-2, 16384: 2.4e-2}}


def test_the_fit_meets_the_two_ends():
    sheet = measured.fitted(TIMES["send"])
    ends = {size: round(measured.predicted("send", size, 2, sheet), 12) for size in TIMES["send"]}
    assert ends == TIMES["send"]


def test_the_table_has_the_ratio_of_measured_to_model():
    lines = measured.table(TIMES, 2).splitlines()
    assert [line.split()[0] for line in lines] == ["op", "send", "send", "all_reduce", "all_reduce"]
    # An all_reduce takes two steps of half of the bytes: the time of one full message, and one more latency.
    assert [line.split()[4] for line in lines[1:]] == ["1.00", "1.00", "2.40", "3.00"]


def test_an_op_takes_as_long_as_on_its_slowest_rank():
    other = {"send": {4096: 5e-3, 16384: 1e-3}, "all_reduce": TIMES["all_reduce"]}
    assert measured.slowest([TIMES, other])["send"] == {4096: 5e-3, 16384: 6e-3}
