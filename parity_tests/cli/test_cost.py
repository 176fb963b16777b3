"""`shardproof cost`: its tables, a user's own scheme, and its messages."""

import json
from pathlib import Path

import pytest

from shardproof.cost import sweep

OWN = """
from shardproof import Cost, integers, scheme
from torch_impl.collectives import all_gather

@scheme(reference=lambda x: x, mesh={"tp": (1, 2, 4)},
    inputs={"x": "s/tp:ragged d"},
    outputs="s d tp=R",
    cost=lambda c: Cost(forward={"all_gather": (1, max(c.layouts["s/tp"]["lengths"]) * c.d * c.itemsize)}),
)
def gathered(mesh, x):
    return all_gather(x, mesh["tp"], out="R")

@scheme(reference=lambda x: x, mesh={"tp": (1, 2)}, inputs={"x": "s/tp"}, outputs="s/tp")
def silent(mesh, x):
    return x

@scheme(reference=lambda x, ends: x, mesh={"tp": (1, 2)}, inputs={"x": "s/tp", "ends": "n"}, outputs="s/tp",
    draw={"ends": integers(1, 3)}, cost=lambda c, ends: Cost())
def of_ends(mesh, x, ends):
    return x
"""


@pytest.fixture(autouse=True)
def own():
    Path("mine.py").write_text(OWN)


def test_a_users_own_scheme(shardproof):
    status, out, err = shardproof("cost", "mine.py::gathered", "--mesh", "tp=1000,pp=100", "--dim", "s=4096,d=8")
    assert (status, err) == (0, "")
    assert "tp=1000 pp=100: 100,000 ranks, 12,500 hosts of 8" in out
    assert "lengths of shards: the standard case, DTensor's" in out
    (line,) = (line.split() for line in out.splitlines() if "all_gather" in line)
    assert line[:4] == ["fwd", "all_gather/tp", "1", "80"]  # 5 rows of 8 elements of 2 bytes
    assert "drawn by --seed 3" in shardproof("cost", "mine.py::gathered", "--mesh", "tp=4", "--seed", "3")[1]


def test_a_line_has_eighty_columns(shardproof):
    attention = ("cost", "attention", "--dim", "s=4194304,h=128,g=128", "--links", "b200")
    for mesh in ("cp=128,tp=64", "cp=16..128,tp=8"):
        status, out, _ = shardproof(*attention, "--mesh", mesh)
        assert status == 0 and max(map(len, out.splitlines())) <= 80
        assert "links b200, not yet measured" in out


def test_a_sweep_has_a_line_for_each_mesh(shardproof):
    status, out, _ = shardproof("cost", "attention", "--mesh", "cp=8..64", "--dim", "s=1024*cp,h=16,g=2")
    step = out.partition("time of a step\n")[2].partition("\n\n")[0].splitlines()
    assert status == 0 and step[0].split() == ["cp", "hosts", "ring", "all_gather", "ulysses", "usp", "least"]
    assert [line.split()[:2] for line in step[1:]] == [["8", "1"], ["16", "2"], ["32", "4"], ["64", "8"]]
    assert "no ulysses on cp=32,64: assume rejects these sizes and options" in out


@pytest.mark.slow
def test_a_figure_of_a_sweep(shardproof):
    words = ("cost", "attention", "--mesh", "cp=8..32", "--dim", "s=1024*cp,h=16,g=2", "--figure", "crossovers.svg")
    assert shardproof(*words)[0] == 0
    assert "<!-- ulysses -->" in Path("crossovers.svg").read_text()


def test_a_sweeps_json_has_the_same_numbers_as_its_text(shardproof):
    words = ("cost", "mine.py::gathered", "--mesh", "tp=2..8", "--dim", "s=8,d=1", "--json")
    record = json.loads(shardproof(*words)[1])
    assert [each["mesh"]["tp"] for each in record["comparisons"]] == [2, 4, 8]
    lines = [each["candidates"][0]["lines"][0] for each in record["comparisons"]]
    assert [line["bytes"] for line in lines] == [8, 4, 2]
    assert all(line["seconds"] > 0 for line in lines)


def test_several_schemes_are_compared(shardproof):
    status, out, _ = shardproof("cost", "mine.py", "--mesh", "tp=4")
    assert status == 0 and "not silent: declares no cost;" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("mine.py::silent", "--mesh", "tp=2"),
            "scheme 'silent': declares no cost; give scheme(...) cost=lambda case: Cost(forward={\"all_reduce\": "
            "(calls, bytes)}), with Cost from shardproof",
        ),
        (("mine.py::gathered", "--mesh", "cp=2"), "--mesh lacks tp: scheme 'gathered' has the axes tp; give tp=N"),
        (("mine.py::gathered", "--mesh", "tp=x"), "--mesh 'tp=x' is not NAME=NUMBER, such as tp=4, nor NAME=FIRST.."),
        (("mine.py::gathered", "--mesh", "tp=0"), "--mesh 'tp=0' is not NAME=NUMBER"),
        (("mine.py::gathered", "--mesh", "tp=8..2"), "--mesh 'tp=8..2': 2 is below 8; give the smaller number first"),
        (("mine.py::gathered", "--mesh", "tp=2..4,pp=2..4"), "--mesh: tp and pp both have a range; give one axis a"),
        (("mine.py::gathered", "--mesh", "tp=2,tp=4"), "--mesh 'tp=4' says 'tp' a second time; give each size once"),
        (("mine.py::gathered", "--mesh", "tp=2000000"), "--mesh tp=2000000 has 2,000,000 ranks; the limit is 1,000,"),
        (("mine.py::gathered", "--mesh", "tp=2", "--dim", "s"), "--dim 's' is not NAME=NUMBER, such as s=131072, nor"),
        (
            ("mine.py::gathered", "--mesh", "tp=2", "--dim", "s=2*cp"),
            "--dim s=2*cp: 'cp' is not an axis of --mesh (tp)",
        ),
        (("mine.py::gathered", "--mesh", "tp=2", "--dim", "s=1-tp"), "--dim s=1-tp is -1; a size is at least 0"),
        (("mine.py::gathered", "--mesh", "tp=2", "--dim", "s=1//0"), "--dim s=1//0 divides by 0"),
        (("mine.py::gathered", "--mesh", "tp=2", "--dim", "z=2"), "scheme 'gathered': 'z' is not a mesh axis, dim or"),
        (("mine.py::gathered", "--mesh", "tp=2", "--dtype", "int8"), "--dtype 'int8' is not one of float64, float32,"),
        (
            ("mine.py::gathered", "--mesh", "tp=2", "--links", "tpu"),
            "--links tpu is neither a file nor a sheet; the sheets",
        ),
        (("mine.py::of_ends", "--mesh", "tp=128"), "scheme 'of_ends': its cost depends on the values of ends, which"),
        (("attention", "mine.py", "--mesh", "cp=2"), "attention is already a comparison of schemes; give it alone"),
    ],
)
def test_unusable_arguments_are_rejected(shardproof, words, message):
    status, out, err = shardproof("cost", *words)
    assert (status, out) == (2, "")
    assert err.replace("\n", " ").startswith(f"shardproof: {message}")


def test_masked_pairs_cost_no_products(shardproof):
    words = ("cost", "attention", "--mesh", "cp=8", "--dim", "s=1024,h=16,g=2", "--json")
    every, seen = (
        [each["products"][0] for each in json.loads(shardproof(*words, *option)[1])["comparisons"][0]["candidates"]]
        for option in ((), ("--option", "causal=True"))
    )
    assert [products * 1025 for products in every] == [2 * 1024 * products for products in seen]


def test_sizes_that_cannot_be_sharded_name_the_dim(shardproof):
    words = ("attention", "--mesh", "cp=64", "--dim", "s=100,h=64,g=8")
    status, out, err = shardproof("cost", *words)
    assert (status, out) == (2, "")
    assert "attention_in_dual_chunk_swap: s=100 cannot be sharded by dual_chunk_swap over cp=64" in err


def test_meshes_and_sizes_are_parsed():
    assert sweep.meshes(["cp=8..40,tp=2"]) == [{"cp": size, "tp": 2} for size in (8, 16, 32)]
    assert sweep.sizes_on({"cp": 4, "tp": 2}, sweep.rules(["s=1024*cp,h=8//tp", "b=1"])) == {"s": 4096, "h": 4, "b": 1}
