"""The page's example of a Megatron layer passes with the page's command; needs megatron-core."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "examples" / "my_megatron.py"


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="not run: needs make peers")
@pytest.mark.parametrize("engine", ("lockstep", "gloo"))
def test_the_example_of_the_page_is_right(engine):
    command = [sys.executable, "-m", "shardproof", "verify", str(EXAMPLE), "--engine", engine, "--examples", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "0 mismatches" in done.stdout, done.stdout + done.stderr
