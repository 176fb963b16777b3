"""shardproof trace FILE: the example of the documentation as it stands, and changed."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardproof.tracing.comparison import Line
from shardproof.tracing.show import TraceReport, print_report

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_pair.py"
ONE = "in_bfloat16 = "  # begins the line of the second pair


def written(*changes):
    """The example with one pair, each old text, which stands there once, exchanged for the new one."""
    text = EXAMPLE.read_text().partition(ONE)[0]
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    Path("my_pair.py").write_text(text)
    return "my_pair.py"


def line_of(text):
    (number,) = [n for n, line in enumerate(Path("my_pair.py").read_text().splitlines(), 1) if text in line]
    return number


@pytest.mark.slow
def test_the_example_is_right(shardproof):
    status, out, err = shardproof("trace", str(EXAMPLE))
    assert (status, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()] == ["block  float32", "in_bfloat16  bfloat16"]
    assert all("23 tensors as in flax, at most 0." in line for line in out.splitlines())


def test_a_difference_is_reported_with_its_table_and_status(shardproof):
    file = written(("epsilon=1e-5", "epsilon=1e-2"))
    status, out, _ = shardproof("trace", file, "--dtype", "float64")
    assert status == 1
    assert "block  float64: first to differ: output of ln, rank 0; look in norm (ln in flax)." in out
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["phase", "forward", "forward"] and "DIFFERS" in out
    (quiet,) = shardproof("trace", file, "-q")[1].splitlines()
    assert quiet.startswith("block  float32: first to differ: output of ln")


def test_a_quiet_trace_is_one_line_where_the_mistake_has_a_pattern(shardproof):
    (quiet,) = shardproof("trace", written(("self.w_up(h))", "self.w_up(h) * 3.0)")), "-q")[1].splitlines()
    assert quiet.startswith("block  float32: first to differ: input of w_down, rank 0; look in ")


def test_standard_output_is_json_only(shardproof):
    status, out, err = shardproof("trace", written(), "--json", "-", "--whole")
    document = json.loads(out)
    (traced,) = document["traces"]
    assert (status, document["status"], traced["name"], traced["verdict"]) == (0, 0, "block  float32", "equal")
    assert traced["lines"][0]["tensor"] == "input of the model" and "output of w_down" in err
    shardproof("trace", "my_pair.py", "--json", "trace.json")
    assert json.loads(Path("trace.json").read_text()) == document


def test_a_narrow_terminal_breaks_the_closing_sentence_between_words():
    terminal = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    line = Line("layers.0.self_attn.q_proj.weight.grad", "backward", "layers.0", error=1.0, budget=100.0, ranks=())
    print_report(terminal, TraceReport("tp=2 cp=2 of a model with a name", "on one device", [line]), False, False)
    first, second = terminal.file.getvalue().splitlines()
    assert len(first) <= 80 and second.startswith("  ")
    assert f"{first} {second.strip()}" == (
        "tp=2 cp=2 of a model with a name: 1 tensor as on one device, at most 0.01 of the budget "
        "(layers.0.self_attn.q_proj.weight.grad)."
    )


def test_a_module_that_raises_is_a_failed_rank(shardproof):
    file = written(("self.down(nn", "self.up(nn"))
    status, out, err = shardproof("trace", file, "--json", "trace.json")
    assert (status, err) == (3, "")
    assert out.startswith("block  float32: raised: the PyTorch module raised RuntimeError: mat1 and mat2")
    assert f"at my_pair.py:{line_of('self.up(nn')}" in out
    (traced,) = json.loads(Path("trace.json").read_text())["traces"]
    assert (traced["verdict"], traced["lines"]) == ("raised", [])


def test_modules_that_are_not_compared_are_reported(shardproof):
    file = written(('"norm": "ln", ', ""))
    status, out, _ = shardproof("trace", file)
    assert status == 0
    assert out.splitlines()[1:] == [
        "  not compared, called by PyTorch alone: norm",
        "  not compared, called by flax alone: ln",
    ]


def test_a_file_that_exits_is_not_traced(shardproof):
    status, out, err = shardproof("trace", written(("x = np.random", "raise SystemExit\nx = np.random")))
    assert (status, out) == (3, "")
    assert re.match(r"shardproof: cannot import my_pair.py: it exits at my_pair.py:\d+; run that code only if", err)


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ((), ("--dtype", "float8"), "--dtype 'float8' is not one of float64, float32, bfloat16, float16"),
        ((), ("--mesh", "cp=2"), "--mesh is of the training step; a pair runs on one rank, so leave it out"),
        ((), ("--json", "no/such/trace.json"), "--json no/such/trace.json: there is no folder no/such"),
        (
            (("block = Pair(Block(), make_flax, (x,), names=NAMES)", ""),),
            (),
            "my_pair.py: declares no pair; write one as NAME = Pair(torch_module, make_flax, inputs)",
        ),
        (
            (('{"norm": "ln"', '{"nrom": "ln"'),),
            (),
            "pair 'block': tracing.Pair: names has 'nrom', which is not a module of the PyTorch side",
        ),
        (
            (('nnx.Param(weights["norm.bias"])', 'nnx.Param(weights["norm.bais"])'),),
            (),
            "pair 'block': the flax module raised KeyError: 'norm.bais' at my_pair.py:",
        ),
        (
            (("(x,), names", "x, names"),),
            (),
            "cannot import my_pair.py:50: TypeError: Pair: inputs is a ndarray; pass a tuple of arrays, such as (x,)",
        ),
    ],
)
def test_an_untraceable_model_is_rejected(shardproof, changes, arguments, sentence):
    status, out, err = shardproof("trace", written(*changes), *arguments)
    assert (status, out.count("tensors as in flax")) == (2, 0)
    assert err.startswith(f"shardproof: {sentence}")


def test_a_file_that_is_not_there(shardproof):
    assert shardproof("trace", "none.py")[::2] == (2, "shardproof: none.py: no such file\n")
    Path("folder").mkdir()
    assert shardproof("trace", "folder")[::2] == (2, "shardproof: folder: is a folder; give a file\n")
