"""A signal to a whole group comes twice: once by itself, and once passed on by the parent."""

import subprocess
import sys

PROGRAM = """
from shardproof.engines import last_act
from shardproof.report.guard import guarded

def interrupt():
    raise KeyboardInterrupt

print(last_act._status_of(lambda: guarded(interrupt) and interrupt()))
"""


def test_a_second_interrupt_adds_no_sentence():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("130\n", "shardproof: interrupted; what was not printed was not judged\n")
