"""`import shardproof`: its names, how little it loads, and users whose own folder is called `parity_tests`."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import shardproof
from parity_tests import warm_python
from parity_tests.slow import slow_but
from shardproof.declare import scheme_index

ROOT = Path(__file__).resolve().parents[1]
IMPORT_NAME = ROOT / "parity_tests" / "import_name"
OF_VERIFY = ("jax", "flax", "optax", "hypothesis", "pytest", "cloudpickle", "typer", "rich", "matplotlib")


def searched(*packages):
    """The environment of a Python that finds this tree after the folder that it runs in, then `packages`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, IMPORT_NAME, *packages]))}


def fresh(*arguments, folder, packages=()):
    """A Python that has loaded nothing; it finds all installed packages, or `packages` alone."""
    command = [sys.executable, *(["-S"] if packages else []), *arguments]
    environment = searched(*packages)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def python(*arguments, folder):
    """A Python that has torch and JAX already."""
    return warm_python.run(*arguments, folder=folder, environment=searched())


def printed(program, folder):
    done = fresh("-c", program, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Names


@pytest.mark.parametrize("name", shardproof.__all__)
def test_every_name_is_there(name):
    assert getattr(shardproof, name) is not None


def test_no_module_hides_a_name():
    """Once a module `shardproof.verify` were imported, it would be the package's attribute in place of the function."""
    assert {path.stem for path in (IMPORT_NAME / "shardproof").iterdir()} & set(shardproof.__all__) == set()


def test_a_missing_name_is_reported_with_the_existing_ones():
    with pytest.raises(AttributeError, match=r"module 'shardproof' has no attribute 'verfy'; it has .*, watch$"):
        _ = shardproof.verfy


def test_every_name_is_listed():
    assert set(shardproof.__all__) <= set(dir(shardproof))


def test_the_import_loads_nothing_else(tmp_path):
    loaded = "set(sys.modules) & {'torch', 'numpy', 'jax', 'hypothesis', 'parity_tests'}"
    assert printed(f"import sys, shardproof; print({loaded})", tmp_path) == "set()"


@pytest.mark.slow
def test_the_names_that_ranks_use_load_no_jax(tmp_path):
    names = "scheme, run, values, CaseSpec, Cost, layouts, RankFailure"
    assert printed(f"import sys; from shardproof import {names}; print('jax' in sys.modules)", tmp_path) == "False"


# The command and its extra


@pytest.fixture
def without(tmp_path):
    """A folder of all installed packages but those that are named."""

    def packages(*absent):
        folder = tmp_path / "packages"
        folder.mkdir()
        for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(place).iterdir():
                if entry.name.partition("-")[0].partition(".")[0] not in absent:
                    (folder / entry.name).symlink_to(entry)
        return folder

    return packages


@pytest.mark.slow
def test_the_module_is_the_command(tmp_path):
    done = python("-m", "shardproof", "--version", folder=tmp_path)
    assert done.returncode == 0 and "torch" in done.stdout


@pytest.mark.parametrize("absent", [OF_VERIFY, ("jax",), ("typer", "rich")], ids=", ".join)
def test_the_command_without_its_extra_is_one_sentence(absent, without, tmp_path):
    done = fresh("-m", "shardproof", "tour", folder=tmp_path, packages=[without(*absent)])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"shardproof: needs {', '.join(absent)}; pip install -e '.[verify]' in the clone\n"


def test_a_name_without_its_extra_is_one_sentence(without, tmp_path):
    program = "from shardproof import every_case"
    done = fresh("-c", program, folder=tmp_path, packages=[without(*OF_VERIFY)])
    assert done.stderr.splitlines()[-1] == (
        "ImportError: shardproof.every_case needs hypothesis; pip install -e '.[verify]' in the clone"
    )


PRODUCTION = """
import importlib, pkgutil, torch_impl

for module in pkgutil.walk_packages(torch_impl.__path__, "torch_impl."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name)
"""


WATCHED = """
import sys, torch, torch.distributed as dist
from shardproof import ledger_table, watch

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with watch() as ledger:
    dist.all_reduce(torch.ones(3))
print(ledger_table(ledger).splitlines()[1].split()[2:], "jax" in sys.modules)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_production_is_imported_and_watched_without_the_verifier(without, tmp_path):
    """Every module of torch_impl; kernels in Triton's language ask for their own extra."""
    done = fresh("-c", PRODUCTION + WATCHED, folder=tmp_path, packages=[without(*OF_VERIFY, "jaxlib", "einops")])
    assert done.returncode == 0, done.stderr
    *missing, watched = done.stdout.splitlines()
    assert [line for line in missing if not line.endswith(" triton")] == []
    assert watched == "['fwd', 'all_reduce', 'world', '1', '12'] False"


# A user's own folder `parity_tests`

HELPER = "def double(x):\n    return 2 * x\n"
SCHEME = """
from shardproof import check, every_case, scheme, values
from parity_tests.helper import double

@scheme(reference=double, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")})
def doubled(mesh, x):
    return double(x)
"""
SCRIPT = """
from my_scheme import doubled
for engine in ("lockstep", "gloo"):
    doubled.verify(engine=engine, tp=2, examples=1).raise_if_failed()
    print(engine, "equal")
"""
TEST = (
    SCHEME
    + """
def test_equal():
    doubled.verify(tp=2, examples=1).raise_if_failed()

def test_equal_on_processes():
    doubled.verify(engine="gloo", tp=2, examples=1).raise_if_failed()
"""
)


@pytest.fixture(params=slow_but(["package with a harness"], ["package", "folder", "package with a harness"]))
def project(request, tmp_path):
    """A project with a folder `parity_tests` of its own, which Python finds before ours."""
    folder = tmp_path / "parity_tests"
    folder.mkdir()
    (folder / "helper.py").write_text(HELPER)
    (folder / "test_doubled.py").write_text(TEST)
    (tmp_path / "my_scheme.py").write_text(SCHEME)
    (tmp_path / "script.py").write_text("if __name__ == '__main__':\n" + SCRIPT.replace("\n", "\n    "))
    if request.param != "folder":
        (folder / "__init__.py").write_text("")
    if request.param == "package with a harness":
        (folder / "harness").mkdir()
        (folder / "harness" / "__init__.py").write_text("")
        (folder / "harness" / "mine.py").write_text(HELPER)
        (folder / "helper.py").write_text("from parity_tests.harness.mine import double as double")
    return tmp_path


@pytest.mark.slow
def test_a_script_beside_it(project):
    done = python("script.py", folder=project)
    assert done.stdout == "lockstep equal\ngloo equal\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(["prepend"], ["prepend", "importlib"]))
def test_pytest_in_it(project, mode):
    """Two tests, and the scheme of a file, which the plugin collects, loaded here whether or not it is installed."""
    plugin = ["-p", "no:shardproof", "-p", "shardproof.pytest_plugin"]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, f"--import-mode={mode}", folder=project)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", slow_but(["my_scheme.py"], ["my_scheme.py", "parity_tests/test_doubled.py"]))
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_the_command_beside_it(project, file, engine):
    verify = ["verify", file, "--engine", engine, "--examples", "1", "--mesh", "tp=2"]
    done = python("-m", "shardproof", *verify, folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 scheme, 0 mismatches, 0 not run." in done.stdout


@pytest.mark.parametrize("engine", slow_but(["gloo"], ["lockstep", "gloo"]))  # whose ranks find the package too
def test_a_built_in_scheme_beside_it(project, engine):
    scheme_index.entries()  # stores an index of what pytest has imported; the command would import every file for it
    verify = ["verify", "sum_to_invariant", "--engine", engine, "--examples", "1", "--mesh", "tp=2"]
    done = python("-m", "shardproof", *verify, folder=project)
    assert done.returncode == 0, done.stdout + done.stderr


NAMES = """
import sys
before = list(sys.meta_path)
import shardproof
try:
    shardproof.check_cases(shardproof.schemes_of_file("wrong.py")[0], examples=1)
except shardproof.ValueMismatch as error:
    print(type(error).__module__, [name for name in sys.modules if name.startswith("parity_tests")])
print([finder for finder in sys.meta_path if "shardproof" in str(finder)])
"""


def test_a_users_error_names_the_package(tmp_path):
    (tmp_path / "wrong.py").write_text(
        """
from shardproof import scheme, values

@scheme(
    reference=lambda x: 2 * x, mesh={"tp": (2,)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")}
)
def wrong(mesh, x):
    return x + 1
"""
    )
    done = python("-c", NAMES, folder=tmp_path)
    assert done.stdout == "shardproof.report.report []\n[]\n", done.stdout + done.stderr


def test_a_file_of_that_name(tmp_path):
    (tmp_path / "parity_tests.py").write_text("mine = 1\n")
    program = "import parity_tests; from shardproof import scheme; print(parity_tests.mine, scheme.__name__)"
    assert printed(program, tmp_path) == "1 scheme"
