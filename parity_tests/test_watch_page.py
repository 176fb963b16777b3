"""docs/how-to/watch-existing-code.md: its example runs under torchrun with the page's output."""

import os
import subprocess
import sys

import pytest

from parity_tests.pages import ROOT, blocks

PAGE = "docs/how-to/watch-existing-code.md"
EXAMPLE = ROOT / "docs" / "examples" / "my_watch.py"


@pytest.mark.slow
def test_the_example_prints_the_pages_output():
    (shown,) = (block for block in blocks(PAGE) if block.language == "text")
    path = os.pathsep.join([str(ROOT), str(ROOT / "parity_tests" / "import_name")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown.text


def test_the_page_includes_the_block():
    lines = EXAMPLE.read_text().splitlines()[33:48]
    assert lines[0] == "def main():" and any("with watch(mesh)" in line for line in lines) and lines[-1] == "    main()"
