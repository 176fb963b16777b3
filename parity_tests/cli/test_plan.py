"""`shardproof plan`: the models that it accepts, and its messages for those that it rejects."""

import re
from pathlib import Path

import pytest

FACTORY = """
from torch import nn

def net(width=4):
    return nn.Sequential(nn.Linear(width, width))

def number():
    return 3
"""
SMALL = ("--option", "num_hidden_layers=2", "--option", "num_key_value_heads=8")


def test_a_model_type(shardproof):
    status, out, err = shardproof("plan", "qwen3", "--mesh", "dp=8,tp=4", *SMALL)
    assert (status, err) == (0, "")
    assert out.startswith("dp_shard=8 tp=4: 32 ranks; ")
    assert "model.layers.*.self_attn.q_norm.weight" in out and "dp_shard Shard(0), tp Shard(1)" in out
    assert ["forward", "all_gather", "dp_shard", "3"] in [line.split()[:4] for line in out.splitlines()]


def test_no_line_is_wider_than_its_reader(shardproof, monkeypatch):
    """A parameter has a second line on a narrow terminal, and no figure is lost."""
    arguments = ("plan", "qwen3", "--mesh", "dp=8,tp=4", *SMALL)
    _, whole, _ = shardproof(*arguments)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = shardproof(*arguments)
    assert max(map(len, whole.splitlines())) > 80 >= max(map(len, out.splitlines()))
    assert out.split() == whole.split()


def test_a_config_class_and_a_folder(shardproof):
    from transformers import LlamaConfig

    status, out, _ = shardproof("plan", "transformers.LlamaConfig", "--mesh", "tp=2", "--option", "num_hidden_layers=2")
    assert status == 0
    LlamaConfig(num_hidden_layers=2).save_pretrained("folder")
    assert shardproof("plan", "folder", "--mesh", "tp=2")[:2] == (0, out)


def test_a_factory(shardproof):
    Path("made.py").write_text(FACTORY)
    status, out, _ = shardproof("plan", "made.py:net", "--mesh", "dp_shard=2", "--option", "width=6")
    assert status == 0
    assert "0.weight    1    6 x 6   dp_shard Shard(0)   3 x 6" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuchmodel",), "nosuchmodel is not a known model; give a model type such as qwen3"),
        (("qwen33",), "qwen33 is not a known model (did you mean qwen3?); give a model type such"),
        (("empty",), "empty: is a folder without config.json; give a model type such as qwen3"),
        (("./empty",), "./empty: is a folder without config.json; give a model type such as qwen3"),
        (("./absent",), "./absent: is not a local folder, and nothing is downloaded; give a model type such as qwen3"),
        (("transformers.NoConfig",), "transformers.NoConfig: module transformers has no attribute NoConfig"),
        (("absent.py:net",), "absent.py: no such file"),
        (("made.py:absent",), "made.py has no function 'absent'"),
        (("made.py",), "made.py: which function in it makes the model? Write made.py:make_model"),
        (
            ("qwen3", "--option", "hidden_sise=2"),
            "--option 'hidden_sise' is not a field of Qwen3Config; did you mean hidden_size?",
        ),
        (("made.py:number",), "made.py:number: gives a int; it must give a torch.nn.Module"),
        (
            ("qwen3", "--mesh", "rows=2", *SMALL),
            "--mesh rows=2: plan knows the axes dp (short for dp_shard), dp_replicate",
        ),
    ],
)
def test_unusable_arguments_are_rejected(shardproof, arguments, message):
    Path("made.py").write_text(FACTORY)
    Path("empty").mkdir()
    status, out, err = shardproof("plan", *arguments)
    assert (status, out) == (2, "")
    assert err.replace("\n", " ").startswith(f"shardproof: {message}")


@pytest.mark.parametrize("axis", ["pp", "ep_shard"])
def test_an_axis_that_is_not_planned_is_rejected(shardproof, axis):
    """Stages are not counted: a rank would be said to hold all of them."""
    status, out, err = shardproof("plan", "qwen3", "--mesh", f"dp=4,{axis}=2", *SMALL)
    assert (status, out) == (2, "")
    assert err.replace("\n", " ").startswith(f"shardproof: --mesh {axis}=2 is not planned: {axis} ")
    assert shardproof("plan", "qwen3", "--mesh", f"dp=4,{axis}=1", *SMALL)[0] == 0


def test_experts_over_ep_are_planned_and_a_model_without_experts_is_rejected(shardproof):
    sizes = ("hidden_size=16", "num_hidden_layers=1", "num_experts=8", "vocab_size=32", "num_attention_heads=2")
    options = [word for size in sizes for word in ("--option", size)]
    status, out, _ = shardproof("plan", "qwen3_moe", "--mesh", "dp=2,ep=4", "--tokens", "6", *options)
    assert status == 0
    assert re.search(r"experts.down_proj +1 +8 x 16 x 768 +dp_shard Shard\(1\), ep Shard\(0\) +2 x 8 x 768", out)
    assert re.search(r"forward +all_to_all +ep +5 ", out) and "not counted" not in out
    status, out, err = shardproof("plan", "qwen3", "--mesh", "dp=4,ep=2", *SMALL)
    assert (status, out) == (2, "")
    assert "ep=2, and Qwen3ForCausalLM has no experts in stacks" in err.replace("\n", " ")


def test_a_model_without_a_plan_is_named(shardproof, recwarn):
    Path("made.py").write_text(FACTORY)
    message = "has no tensor-parallel plan; use a mesh without tp, or dry_run(model, mesh, tp_shard_plan=...) in Python"
    for mesh in ("tp=2", "dp=2,tp=4", "tensor_parallel=2"):
        status, out, err = shardproof("plan", "made.py:net", "--mesh", mesh)
        assert (status, out, err.replace("\n", " ")) == (2, "", f"shardproof: made.py:net: Sequential {message} ")
    assert shardproof("plan", "made.py:net", "--mesh", "dp=2,tp=1")[0] == 0
    assert not recwarn.list
