"""`shardproof watch script.py args`: a script runs as Python runs it, and its collectives are printed."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

import beside


class Summed(torch.nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x


dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
Summed()(torch.ones(5))
dist.destroy_process_group()
print(__name__, sys.argv, beside.NAME, os.environ.get("OMP_NUM_THREADS"))
"""
TABLE = """module  phase  op          group  calls  bytes
Summed  fwd    all_reduce  world      1     20
"""


def watch_script(folder, *arguments, end="", **environment):
    (folder / "beside.py").write_text("NAME = 'beside'")
    (folder / "my_script.py").write_text(SCRIPT + end)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | environment
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", "watch", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_script_has_its_arguments_its_folder_and_its_environment(tmp_path):
    status, out, err = watch_script(tmp_path, "--rows", "my_script.py", "--rows", "--json", "--lr", "3")
    said = "__main__ ['my_script.py', '--rows', '--json', '--lr', '3'] beside None\n"
    row = "Summed | all_reduce float32[5] SUM (group world, #0) at my_script.py:13\n"
    assert (status, err, out) == (0, "", said + TABLE + row)


def test_a_script_that_needs_a_launcher_is_told_so(tmp_path):
    (tmp_path / "of_a_job.py").write_text("import torch.distributed as dist\n\ndist.init_process_group('gloo')\n")
    status, _, err = watch_script(tmp_path, "of_a_job.py", "--lr", "3")
    *traceback, last = err.splitlines()
    assert status == 3 and "environment variable RANK expected" in traceback[-1]
    start = "torchrun --nproc-per-node 2 -m shardproof watch of_a_job.py"
    assert last == f"shardproof: of_a_job.py needs a launcher; start it by {start}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "printed"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise KeyError('no data')", 3, "KeyError: 'no data'\n"),
    ],
)
def test_after_the_table_the_command_ends_like_the_script(tmp_path, end, status, printed):
    found, out, err = watch_script(tmp_path, "my_script.py", end=end)
    assert found == status and out.endswith(TABLE) and err.endswith(printed)


@pytest.mark.slow
def test_one_rank_prints(tmp_path):
    assert TABLE in watch_script(tmp_path, "--rank", "1", "my_script.py", RANK="1")[1]
    assert "module" not in watch_script(tmp_path, "my_script.py", RANK="1")[1]


@pytest.mark.slow
def test_a_script_that_is_not_there(tmp_path):
    status, out, err = watch_script(tmp_path, "my_scrip.py")
    assert (status, out, err) == (2, "", "shardproof: watch: my_scrip.py: no such file; give a script\n")


@pytest.mark.slow
def test_on_a_safe_path_the_folder_of_the_script_is_not_searched(tmp_path):
    path = os.pathsep.join(entry for entry in sys.path if entry)  # an empty entry is the working folder
    status, _, err = watch_script(tmp_path, "my_script.py", PYTHONSAFEPATH="1", PYTHONPATH=path)
    assert status == 3 and err.endswith("ModuleNotFoundError: No module named 'beside'\n")
