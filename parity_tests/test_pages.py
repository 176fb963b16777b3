"""Pages keep their word: links and paths lead somewhere, commands and their options exist, Python blocks run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib

import pytest
import torch
import typer
from hypothesis import strategies
from packaging.specifiers import SpecifierSet

from parity_tests.pages import (
    GENERATED,
    ROOT,
    Block,
    anchors,
    blocks,
    commands,
    is_complete,
    links,
    pages,
    paths_in_code,
    text_of,
)
from shardproof import Cost, scheme
from shardproof.cli.app import app
from shardproof.declare.case import ENGINES
from shardproof.replays import _arguments

PAGES = pages()
NOTEBOOKS = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("notebooks/[0-9]*.py"))]
BLOCKS = [block for page in PAGES for block in blocks(page)]
SCRIPTS = [block for block in BLOCKS if block.language in ("console", "sh")]
PYTHON = [block for block in BLOCKS if block.language == "python"]
DIRECTIVES = {"{toctree}", "{eval-rst}"}
SHOWN = {"text", "diff"}  # output, and changes to a file; nobody runs them
VERBS = typer.main.get_command(app).commands
MAKEFILE = (ROOT / "Makefile").read_text()


# Links and paths


@pytest.mark.parametrize("page", PAGES + NOTEBOOKS)
def test_links_lead_somewhere(page):
    lost = []
    for link in links(page):
        file, _, anchor = link.partition("#")
        if re.match(r"https?:|mailto:", link):
            continue
        target = (ROOT / page).parent / file if file else ROOT / page
        if target.resolve().relative_to(ROOT).as_posix() in GENERATED:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.resolve().relative_to(ROOT).as_posix())):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES + NOTEBOOKS)
def test_paths_of_the_repository_exist(page):
    trees = ("torch_impl", "jax_ref", "parity_tests", "notebooks", "docs")
    named = [path for path in paths_in_code(page) if path.split("/")[0] in trees]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_is_in_a_table_of_contents():
    listed = {
        ((ROOT / page).parent / link).resolve().relative_to(ROOT).as_posix()
        for page in PAGES
        for block in blocks(page)
        if block.language == "{toctree}"
        for link in links(page)
        if link.endswith(".md") and "#" not in link
    }
    assert sorted(page for page in PAGES if page.startswith("docs/") and page not in {*listed, "docs/index.md"}) == []


# Blocks: each is run by something


def test_every_block_has_a_kind_that_a_test_checks():
    kinds = {block.language.split(" ")[0] for block in BLOCKS}
    directives = {kind for kind in kinds if kind.startswith("{")} - {"{code-cell}"}
    assert kinds - directives - {"{code-cell}"} <= SHOWN | {"console", "sh", "python"}
    assert directives <= DIRECTIVES | {"{image}", "{literalinclude}", "{figure}"}


def test_cells_are_executed_where_pages_are_built():
    """A page with cells says which kernel runs them; the build executes them all, and fails where one does."""
    with_cells = {block.page for block in BLOCKS if block.language.startswith("{code-cell}")}
    assert with_cells and all("file_format: mystnb" in text_of(page) for page in with_cells)
    settings = (ROOT / "docs" / "conf.py").read_text()
    assert 'nb_execution_mode = "force"' in settings and "nb_execution_raise_on_error = True" in settings
    assert re.search(r"^\t\$\(BIN\)/python -m sphinx -W", MAKEFILE, re.MULTILINE)
    assert "make docs" in (ROOT / ".github" / "workflows" / "nightly.yml").read_text()


# Commands: programs, verbs, options and files that exist


def read_command(words: list[str]) -> None:
    """Read one command as its program would. Errors: the program's own error for a wrong command."""
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program == "shardproof":
        read_verb(rest)
    elif program == "make":
        for target in rest:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"the Makefile has no target {target!r}"
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        job = get_args_parser().parse_args(rest)
        assert job.module and job.training_script == "shardproof"
        read_verb(job.training_script_args)
    elif program == "python" and rest[:2] == ["-m", "venv"]:
        assert len(rest) == 3
    elif program == "python" and rest[0] == "-m":
        read_module(rest[1:])
    elif program == "python":
        assert rest[0].startswith("replay_") or (ROOT / rest[0]).exists(), f"there is no {rest[0]}"
        if rest[0].startswith("replay_"):
            _arguments(rest[1:])
    elif program == "pytest":
        read_module(words)
    elif program == "pip" or (program == "uv" and rest[0] == "pip"):
        read_install(rest)
    elif program == "uv":
        assert rest[0] == "venv", f"uv {rest[0]}: an environment is made by uv venv"
        read_python(rest[2])
    elif program == "conda":
        assert rest[0] in ("create", "activate"), f"conda {rest[0]}: install packages by pip"
        for word in rest:
            read_python(word.removeprefix("python="))
    else:
        assert program in ("export", "cd", "git", "."), f"{program!r}: say in read_command() how to read such a command"


def read_python(word: str) -> None:
    """Check that a word that is a version of Python lies within our bounds."""
    if re.fullmatch(r"\d+\.\d+", word):
        with (ROOT / "pyproject.toml").open("rb") as file:
            bounds = SpecifierSet(tomllib.load(file)["project"]["requires-python"])
        assert word in bounds, f"Python {word} is outside {bounds}"


def read_verb(rest: list[str]) -> None:
    verb = VERBS[rest[0]]
    parameters = verb.make_context(rest[0], rest[1:]).params
    assert parameters.get("engine") in {None, *ENGINES}


def read_module(words: list[str]) -> None:
    """`MODULE arguments`: check that the module exists, and each path among the arguments."""
    module, *rest = words
    assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
    files = [word for word in rest if "/" in word and not word.startswith("-")]
    assert [file for file in files if not (ROOT / file.split("::")[0]).exists()] == []


def read_install(words: list[str]) -> None:
    """Check that the named extras of this project exist."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named = {extra for word in words for extras in re.findall(r"\[(.*)\]", word) for extra in extras.split(",")}
    assert named <= set(extras), f"there are no extras {sorted(named - set(extras))}"


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_programs_accept_the_commands_of_pages(block):
    lines = commands(block)
    assert lines
    for words in lines:
        read_command(words)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("shardproof verify x.py --egnine gloo", "No such option"),
        ("shardproof verifi x.py", "verifi"),
        ("shardproof verify x.py --examples none", "is not a whole number"),
        ("shardproof verify x.py --engine gloop", "gloop"),
        ("python -m parity_tests.nothing", "no module parity_tests.nothing"),
        ("make everything", "no target 'everything'"),
        ("pip install 'shardproof[tse]'", "no extras"),
        ("conda install shardproof", "install packages by pip"),
        ("uv venv --python 3.14", "Python 3.14 is outside"),
        ("brew install shardproof", "say in read_command"),
    ],
)
def test_a_wrong_command_is_seen(wrong, message):
    with pytest.raises(Exception, match=message):
        read_command(shlex.split(wrong))


def test_options_named_in_prose_exist():
    existing = {option for verb in VERBS.values() for x in verb.params for option in (*x.opts, *x.secondary_opts)}
    existing |= options_of("parity_tests/evidence/benchmarks/__main__.py") | options_of(
        "parity_tests/evidence/injected_bugs/__main__.py"
    )
    existing |= options_of("parity_tests/evidence/mutants/tiers.py")
    existing |= {option for x in typer.main.get_command(app).params for option in x.opts}
    existing |= {"--nproc-per-node", "--rdzv-endpoint"}  # of torchrun
    existing |= {"--hypothesis-profile", "--full-trace", "--shardproof-engine", "--shardproof-examples"}  # of pytest
    existing |= {"--help", "--version", "--install-completion", "--show-completion"}  # of the command itself
    prose = {page: re.findall(r"`(?:[^`\n]* )?(--[a-z][a-z0-9-]*)[^`\n]*`", text_of(page)) for page in PAGES}
    unknown = {page: sorted(set(options) - existing) for page, options in prose.items()}
    assert {page: options for page, options in unknown.items() if options} == {}


def options_of(path: str) -> set[str]:
    """Keywords of the file's `main`, as options."""
    body = ast.parse((ROOT / path).read_text()).body
    (main,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    return {f"--{argument.arg.replace('_', '-')}" for argument in main.args.args + main.args.kwonlyargs}


# Python blocks: the set-up that each needs is put before it, and then it runs


def step_names():
    return {"data_ranks": 2, "summed_token_losses": 3.0, "N": 6}


def draw_names():
    return {"scheme": scheme, "st": strategies}


def optimizer_names():
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def cost_names():
    return {"Cost": Cost}


# (page, number of its block): values for the block's free names.
PREPARED = {
    ("docs/concepts/tolerance-and-budget.md", 0): dict,
    ("docs/reference/context-parallel.md", 0): dict,
    ("docs/reference/context-parallel.md", 1): dict,
    ("docs/reference/context-parallel.md", 2): dict,
    ("docs/reference/optimizers.md", 0): optimizer_names,
    ("docs/reference/optimizers.md", 1): optimizer_names,
    ("docs/reference/optimizers.md", 2): optimizer_names,
    ("docs/reference/parallelizer.md", 0): step_names,
    ("docs/reference/scheme.md", 0): draw_names,
    ("docs/reference/scheme.md", 1): dict,
    ("docs/reference/scheme.md", 2): draw_names,
    ("docs/reference/scheme.md", 3): cost_names,
}


FRAGMENTS = [block for block in PYTHON if not is_complete(block.page)]  # test_snippets.py runs the others


def test_every_python_block_is_prepared():
    assert {(block.page, block.nth) for block in FRAGMENTS} == set(PREPARED)


@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
def test_a_python_block_runs(block: Block):
    exec(compile(block.text, str(block), "exec"), PREPARED[block.page, block.nth]())
