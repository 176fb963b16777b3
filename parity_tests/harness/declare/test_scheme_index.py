"""The index of built-in schemes equals the result of an import, is valid for these sources only, and never fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.slow import slow_but
from shardproof.declare import discover, scheme_index
from shardproof.draw.size_choices import meshes
from shardproof.report import declared_pictures
from shardproof.report.declared_pictures import pictured_case
from shardproof.report.picture import scheme_picture

QUIET_LIST = "from shardproof.cli.app import app; import sys; app(['list', '-q'], standalone_mode=False); "
DRAW = "from shardproof.cli.app import app; import sys; app(['draw', *sys.argv[1:]], standalone_mode=False); "
LOADED = "print([name for name in ('torch', 'jax', 'hypothesis') if name in sys.modules])"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardproof"


@pytest.fixture
def few_pictures(monkeypatch):
    """One picture for each scheme, since all pictures take three seconds."""
    monkeypatch.setattr(declared_pictures, "declared_pictures", lambda scheme: {"tp=2": f"drawn: {scheme.name}"})


@pytest.mark.slow
def test_the_index_equals_an_import(cache, monkeypatch, few_pictures):
    imported = scheme_index.entries()
    assert [entry.key for entry in imported] == [scheme.key for scheme in discover.built_in()]
    monkeypatch.setattr(discover, "built_in", None)
    assert scheme_index.entries() == imported
    assert [file.name.partition("-")[0] for file in cache.iterdir()] == ["schemes"]


@pytest.mark.slow
def test_a_name_imports_its_file_and_no_other(cache, few_pictures):
    scheme_index.entries()
    script = (
        "import sys; from shardproof.declare import discover\n"
        "(scheme,) = discover.find(['vocab_parallel_logprob'])\n"
        "print([name for name in sys.modules if '.test_' in name] == [scheme.key.partition(':')[0]])"
    )
    run = warm_python.run("-c", script, folder=scheme_index.ROOT)
    assert run.stdout == "True\n", run.stderr


@pytest.mark.slow
def test_the_list_loads_neither_torch_nor_jax(cache, few_pictures):
    names = [entry.name for entry in scheme_index.entries() if entry.public]
    command = [sys.executable, "-c", QUIET_LIST + LOADED]
    run = subprocess.run(command, capture_output=True, text=True, cwd=scheme_index.ROOT)
    assert run.stdout.splitlines() == [*names, "[]"], run.stderr


@pytest.mark.slow
def test_a_picture_of_a_declared_mesh_loads_neither_torch_nor_jax(cache):
    scheme = next(each for each in discover.built_in() if {"cp", "tp"} <= set(each.mesh))
    scheme_index.entries()
    mesh = meshes(scheme, {}, None)[1]
    for given in ({}, mesh, {"tp": mesh["tp"]}):
        options = [word for axis, size in given.items() for word in ("--mesh", f"{axis}={size}")]
        command = [sys.executable, "-c", DRAW + LOADED, scheme.name, *options]
        run = subprocess.run(command, capture_output=True, text=True, cwd=scheme_index.ROOT)
        picture = scheme_picture(scheme, pictured_case(scheme, given))
        assert run.stdout == f"{scheme.name}\n{picture}\n\n[]\n", run.stderr


@pytest.mark.slow
def test_other_sizes_have_no_stored_picture(cache):
    assert scheme_index.stored_picture("vocab_parallel_logprob", {"tp": 2}) is None
    scheme_index.entries()
    assert scheme_index.stored_picture("vocab_parallel_logprob", {"tp": 2}) is not None
    for name, sizes in (
        ("vocab_parallel_logprob", {"tp": 2, "v": 8}),
        ("vocab_parallel_logprob", {"cp": 2}),
        ("a", {}),
    ):
        assert scheme_index.stored_picture(name, sizes) is None


def test_a_terminal_shows_the_progress_of_the_index(monkeypatch, capsys):
    component = scheme_index.ROOT / "parity_tests" / "vocab_parallel"
    monkeypatch.setattr(discover, "component_folders", lambda: [component])
    scheme_index.entries()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(scheme_index, "_stored", lambda: None)
    scheme_index.entries()
    out, err = capsys.readouterr()
    assert out == "" and all(f"{doing} built-in schemes" in err for doing in ("importing", "indexing", "drawing"))


@pytest.mark.slow
def test_a_failed_import_stores_no_index(cache, monkeypatch):
    """A process without a package, or with schemes from elsewhere, stores no index for the next process."""
    monkeypatch.setattr(discover, "left_out", lambda: {"test_hf_plan.py": "needs torch; pip install it"})
    assert scheme_index.entries() and not cache.exists()
    monkeypatch.setattr(discover, "built_in", list)
    monkeypatch.setattr(discover, "left_out", dict)
    assert scheme_index.entries() == [] and not cache.exists()


ANOTHER_VERSION = '{"schemes": [{"key": "of another version"}], "pictures": {}}'
NO_SCHEMES = '{"schemes": [], "pictures": {}}'


DAMAGED_TEXTS = ["", "[{", "[]", "5", "[" * 200_000, NO_SCHEMES, ANOTHER_VERSION, "\x00\xff"]


@pytest.mark.slow
@pytest.mark.parametrize("text", slow_but(["[{", ANOTHER_VERSION], DAMAGED_TEXTS), ids=len)
def test_a_damaged_index_is_rebuilt(text, cache, few_pictures):
    expected = scheme_index.entries()
    for file in cache.iterdir():
        file.write_text(text)
    assert scheme_index.stored_picture("vocab_parallel_logprob", {"tp": 2}) is None
    assert scheme_index.entries() == expected == scheme_index.entries()


def test_a_changed_source_has_another_index(cache, tmp_path, monkeypatch):
    source = tmp_path / "root" / "parity_tests" / "test_new.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    monkeypatch.setattr(scheme_index, "SOURCES", [tmp_path / "root"])
    names = [scheme_index._file().name]
    os.utime(source, ns=(1, 1))
    names.append(scheme_index._file().name)
    source.write_text("x = 12\n")
    os.utime(source, ns=(1, 1))
    names.append(scheme_index._file().name)
    source.with_name("other.py").write_text("")
    names.append(scheme_index._file().name)
    assert len(set(names)) == 4


@pytest.mark.slow
def test_pictures_that_are_not_text_are_rebuilt(cache, few_pictures):
    expected = scheme_index.entries()
    (file,) = cache.iterdir()
    index = json.loads(file.read_text())
    for pictures in (5, {"vocab_parallel_logprob": 5}, {"vocab_parallel_logprob": {"tp=2": 5}}):
        file.write_text(json.dumps({**index, "pictures": pictures}))
        assert scheme_index.stored_picture("vocab_parallel_logprob", {"tp": 2}) is None
    assert scheme_index.entries() == expected
    assert json.loads(file.read_text()) == index


@pytest.mark.slow
def test_an_unwritable_folder_costs_only_time(cache, monkeypatch, few_pictures):
    expected = scheme_index.entries()
    for file in cache.iterdir():
        file.unlink()
    cache.rmdir()
    cache.write_text("a file, so that no folder can be made")
    monkeypatch.setattr(declared_pictures, "declared_pictures", None)  # nothing is drawn that cannot be stored
    assert scheme_index.entries() == expected


@pytest.mark.slow
def test_a_few_old_indexes_are_kept(cache, few_pictures):
    cache.mkdir()
    for number in range(scheme_index.MAX_FILES + 3):
        file = cache / f"schemes-{number:016x}.json"
        file.write_text("[]")
        os.utime(file, (number, number))
    scheme_index.entries()
    left = sorted(Path(file).name for file in cache.glob("schemes-*"))
    assert len(left) == scheme_index.MAX_FILES and f"schemes-{0:016x}.json" not in left
