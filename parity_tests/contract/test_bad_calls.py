"""Wrong calls of public functions: rejected on every rank, by the name of the argument, before anything is sent."""

import json
import os
import subprocess
import sys

import pytest

from parity_tests.contract.bad_calls import Call, is_clear

UNCLEAR = 0.01  # of all calls


def counted(calls, seed):
    """The counts of a process of its own, and the calls that are not rejected clearly with their answers."""
    command = [sys.executable, "-m", "parity_tests.contract.bad_calls", str(calls), str(seed)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    *unclear, counts = map(json.loads, done.stdout.decode().splitlines())
    return counts, unclear


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wrong_calls_are_rejected_by_name():
    counts, unclear = counted(3000, 0)
    late = [call["answers"] for call in unclear if " after a collective: " in call["answers"][0]]
    # Values of all ranks together can only be judged after they were exchanged, and then by all ranks alike.
    assert [each for each in late if len(set(each)) > 1 or not each[0].startswith("ValueError ")] == []
    assert len(unclear) <= UNCLEAR * counts["calls"], json.dumps(unclear, indent=1)


def test_an_answer_is_clear_if_it_names_the_argument():
    call = Call("layouts.shard", "x", "None")
    assert is_clear("TypeError: layouts.shard: x is None; pass a Tensor", call) and is_clear("accepted", call)
    assert not is_clear("AttributeError: 'NoneType' object has no attribute 'shape'", call)
    assert not is_clear("TypeError: 'NoneType' object is not subscriptable", call)
    assert not is_clear("TypeError after a collective: layouts.shard: x is None", call)
