"""A rank's process imports a scheme's file before it loads the function, so the file's patches apply."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from shardproof.declare.discover import schemes_of_file
from shardproof.engines.processes import pool

SCHEME = """
import jax.numpy as jnp
import torch
from shardproof import scheme, values
{imports}

@scheme(reference=lambda x: x * 2.0, mesh={{"tp": (1, 2)}}, inputs={{"x": "b/tp"}}, outputs="b/tp",
        draw={{"x": values("normal")}}, dtypes=("float32",))
def doubled(mesh, x):
    return {body}
"""
SHIM = """
import torch
torch.Tensor.twice = lambda self: self * 2
"""
WARNS = """
import warnings
warnings.warn("on import")
def warned(x):
    warnings.warn("when called")
    return x
"""


SUMS_IN_PLACE = """
import torch.distributed as dist
def summed(mesh, x):
    dist.all_reduce(x, group=mesh["tp"])
    return x
"""


def written(folder: Path, name: str, **parts: str) -> str:
    path = folder / name
    path.write_text(SCHEME.format(**parts))
    return str(path)


@pytest.fixture(autouse=True)
def without_the_patch(monkeypatch):
    """Undo, at the end of a test, its file's changes to torch.Tensor in this process."""
    import torch

    yield
    for name in ("twice", "imported"):
        if hasattr(torch.Tensor, name):
            delattr(torch.Tensor, name)


@pytest.mark.parametrize("imports", ["import a_shim", SHIM])
def test_a_files_patches_apply_on_every_rank(tmp_path, imports):
    (tmp_path / "a_shim.py").write_text(SHIM)
    (scheme,) = schemes_of_file(written(tmp_path, "shimmed.py", imports=imports, body="x.twice()"))
    assert scheme.verify("gloo", examples=2, tp=2).ok


def test_a_file_of_a_package_is_imported_under_its_name(tmp_path):
    folder = tmp_path / "packaged"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "shim.py").write_text(SHIM)
    (scheme,) = schemes_of_file(written(folder, "schemes.py", imports="from . import shim", body="x.twice()"))
    assert scheme.verify("gloo", examples=2, tp=2).ok


def test_a_file_is_imported_once_by_each_rank(tmp_path):
    count = "torch.Tensor.imported = getattr(torch.Tensor, 'imported', 0) + 1"
    (scheme,) = schemes_of_file(written(tmp_path, "counted.py", imports=count, body="x * 2 * x.imported"))
    assert scheme.verify("gloo", examples=3, tp=2).ok


@pytest.mark.slow
def test_jax_is_imported_once_in_the_server_and_starts_no_thread_there(tmp_path):
    """Otherwise every rank would import jax with the file, although ranks evaluate no reference."""
    pool.close()
    was_there = "import sys\nwas_there = 'jax' in sys.modules"
    file = written(tmp_path, "with_jax.py", imports="", body="x * 2 if was_there else x * 0")
    Path(file).write_text(f"{was_there}\n{Path(file).read_text()}")
    (scheme,) = schemes_of_file(file)
    assert scheme.verify("gloo", examples=2, tp=2).ok
    if Path("/proc/self/task").exists():
        assert len(os.listdir(f"/proc/{pool.pids()[0]}/task")) == 1


@pytest.mark.slow
def test_a_verification_at_import_runs_only_in_the_parent(tmp_path):
    file = written(tmp_path, "recursive.py", imports=SHIM, body="x.twice()")
    with open(file, "a") as end:
        end.write("\nREPORT = doubled.verify('gloo', examples=1, tp=2)\n")
    (scheme,) = schemes_of_file(file)
    assert scheme.fn.__globals__["REPORT"].ok
    assert scheme.verify("gloo", examples=1, tp=2).ok


def test_a_file_that_cannot_be_imported_on_a_rank_is_reported_with_its_line(tmp_path):
    raising = f"import os\nif os.getpid() != {os.getpid()}: raise OSError('no disk')"
    (scheme,) = schemes_of_file(written(tmp_path, "raising_on_ranks.py", imports=raising, body="x * 2"))
    report = scheme.verify("gloo", examples=1, tp=2)
    assert "OSError: no disk at raising_on_ranks.py:6" in str(report.failure)


@pytest.mark.slow
def test_warnings_are_written_once(tmp_path, capfd):
    pool.close()  # the next ranks write where this test reads
    with pytest.warns(UserWarning, match="on import"):
        (scheme,) = schemes_of_file(written(tmp_path, "warning.py", imports=WARNS, body="warned(x) * 2"))
    assert scheme.verify("gloo", examples=2, tp=2).ok
    pool.renew(2)
    assert scheme.verify("gloo", examples=2, tp=2).ok
    shown = capfd.readouterr().err
    assert shown.count("UserWarning: when called") == 1 and "on import" not in shown


@pytest.mark.slow
def test_torch_does_not_warn_of_a_gradient_that_is_judged(tmp_path, capfd):
    pool.close()  # the next ranks write where this test reads
    body = "x * 2 + summed(mesh, x * 0)"
    (scheme,) = schemes_of_file(written(tmp_path, "in_place.py", imports=SUMS_IN_PLACE, body=body))
    assert scheme.verify("gloo", examples=1, tp=2).ok
    assert "autograd" not in capfd.readouterr().err


def test_ranks_run_a_module_as_it_is_now(tmp_path, monkeypatch):
    """As in a notebook, where a module is edited and loaded again."""
    monkeypatch.syspath_prepend(tmp_path)
    helper = tmp_path / "a_factor.py"
    helper.write_text("FACTOR = 2\n")
    imports = "import a_factor"
    (scheme,) = schemes_of_file(written(tmp_path, "reloading.py", imports=imports, body="a_factor.FACTOR * x"))
    assert scheme.verify("gloo", examples=1, tp=2).ok
    helper.write_text("FACTOR = 3.0\n")
    importlib.reload(sys.modules["a_factor"])
    assert not scheme.verify("gloo", examples=1, tp=2).ok
    del sys.modules["a_factor"]
