"""Each rank of lockstep has its own globals for a scheme's modules, like a process."""

import sys
from pathlib import Path

import pytest

from shardproof.declare.discover import schemes_of_file

HEAD = """
import functools
import torch
import torch.distributed as dist
from shardproof import scheme, values
import a_state_of_{name}

def declare(function, **more):
    return scheme(reference=lambda x: x * 2.0, mesh={{"tp": (1, 2, 4)}}, inputs={{"x": "b/tp"}}, outputs="b/tp",
                  draw={{"x": values("normal")}}, dtypes=("float32",), **more)(function)
"""
STATE = """
import functools
import torch
import torch.distributed as dist

GROUP = None
RANK = -1
BUFFERS = {}
NESTED = {"of": [{}]}
TENSOR = torch.zeros(1)

class Memory:
    def __init__(self):
        self.buffer, self.more = {}, 0
    def take(self, n):
        return self.buffer.setdefault(n, torch.empty(n))

MEMORY = Memory()
SAME = MEMORY

@functools.cache
def first_rank():
    return dist.get_rank()

@torch.compile(backend="eager")
def twice(x):
    return x * 2

def initialize(mesh):
    global GROUP, RANK
    assert GROUP is None
    GROUP, RANK = mesh["tp"], mesh.rank("tp")
"""

BODIES = {
    "a group that setup binds": (
        "y = x * 1; dist.all_reduce(torch.ones(1), group=S.GROUP); return y * 2 if S.RANK == mesh.rank('tp') else y",
        "setup=S.initialize",
    ),
    "a group that the function binds": (
        "S.GROUP = mesh['tp']; dist.barrier(group=mesh['tp']); y = x * 2\n"
        "    dist.all_reduce(torch.ones(1), group=S.GROUP); return y",
        "",
    ),
    "a dict": (
        "S.BUFFERS['x'] = x; dist.barrier(group=mesh['tp']); return S.BUFFERS['x'] * 2",
        "",
    ),
    "a dict in a list in a dict": (
        "S.NESTED['of'][0]['x'] = x; dist.barrier(group=mesh['tp']); return S.NESTED['of'][0]['x'] * 2",
        "",
    ),
    "a tensor written in place": (
        "S.TENSOR.fill_(mesh.rank('tp')); dist.barrier(group=mesh['tp']); return x * 2 + S.TENSOR - mesh.rank('tp')",
        "",
    ),
    "an object of a class of the module": (
        "b = S.MEMORY.take(len(x)); b.copy_(x.detach()); dist.barrier(group=mesh['tp'])\n"
        "    return x * 2 + S.SAME.take(len(x)) - x.detach()",
        "",
    ),
    "a cached function": (
        "r = S.first_rank(); dist.barrier(group=mesh['tp']); return x * 2 if r == dist.get_rank() else x",
        "",
    ),
    "a compiled function": ("return S.twice(x)", ""),
    "a function that is compiled within": (
        "dist.barrier(group=mesh['tp']); return torch.compile(lambda x: x * 2, backend='eager')(x)",
        "",
    ),
    "a new name": (
        "S.NEW = mesh.rank('tp'); dist.barrier(group=mesh['tp']); return x * 2 + S.NEW - mesh.rank('tp')",
        "",
    ),
}


def declared(folder: Path, name: str, body: str, more: str = ""):
    (folder / f"a_state_of_{name}.py").write_text(STATE)
    head = HEAD.format(name=name) + f"\nS = a_state_of_{name}\n"
    (folder / f"{name}.py").write_text(f"{head}\ndef doubled(mesh, x):\n    {body}\ndeclare(doubled, {more})\n")
    (scheme,) = schemes_of_file(str(folder / f"{name}.py"))
    return scheme


@pytest.mark.slow
@pytest.mark.parametrize("what", BODIES)
def test_ranks_do_not_share(what, tmp_path):
    name = what.replace(" ", "_")
    scheme = declared(tmp_path, name, *BODIES[what])
    for engine in ("lockstep", "gloo"):
        for size in (4, 2):
            report = scheme.verify(engine, examples=2, tp=size, seed=1)
            assert report.ok, report
    state = sys.modules[f"a_state_of_{name}"]
    assert (state.GROUP, state.RANK, state.BUFFERS, state.NESTED) == (None, -1, {}, {"of": [{}]})
    assert state.TENSOR.tolist() == [0.0] and not state.MEMORY.buffer and not hasattr(state, "NEW")


def test_a_ranks_globals_stay_for_the_next_case(tmp_path):
    scheme = declared(tmp_path, "counted", "S.RANK += 1; return x * 2 + S.RANK")
    assert [scheme.run([1.0, 1.0], tp=2).tolist() for _ in range(3)] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]


def test_new_globals_of_the_process_reach_every_rank(tmp_path):
    scheme = declared(
        tmp_path, "rebound", "S.RANK += 1; return x * 2 + S.RANK + S.BUFFERS.get('more', 0) + S.MEMORY.more"
    )
    state = sys.modules["a_state_of_rebound"]
    assert scheme.run([1.0, 1.0], tp=2).tolist() == [2.0, 2.0]
    state.RANK = 9
    assert scheme.run([1.0, 1.0], tp=2).tolist() == [12.0, 12.0]
    state.BUFFERS["more"] = 100
    assert scheme.run([1.0, 1.0], tp=2).tolist() == [113.0, 113.0]
    state.MEMORY.more = 1000
    assert scheme.run([1.0, 1.0], tp=2).tolist() == [1114.0, 1114.0]


def test_a_name_that_is_no_module_is_rejected(tmp_path):
    naming = declared(tmp_path, "naming", "return x", "isolate=('torhc.library',)")
    with pytest.raises(ValueError, match=r"isolate names 'torhc\.library', and there is no module 'torhc'; name one"):
        naming.verify(examples=1, tp=2, b=2)


@pytest.mark.slow
def test_a_module_of_a_library_is_isolated_where_it_is_named(tmp_path):
    body = "import this_library as L; L.VALUE = mesh.rank('tp'); dist.barrier(group=mesh['tp'])\n"
    body += "    return x * 2 + L.VALUE - mesh.rank('tp')"
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "this_library.py").write_text("VALUE = 0\n")
    sys.path.insert(0, str(library))
    try:
        assert not declared(tmp_path, "sharing", body).verify(examples=1, tp=2, b=2).ok
        assert declared(tmp_path, "naming_library", body, "isolate=('this_library',)").verify(examples=1, tp=2, b=2).ok
    finally:
        sys.path.remove(str(library))


@pytest.mark.slow
def test_after_a_failure_the_process_has_its_own_values(tmp_path):
    body = "S.RANK = mesh.rank('tp'); S.NEW = 1; dist.barrier(group=mesh['tp']); return {}[S.RANK]"
    scheme = declared(tmp_path, "failing", body)
    assert "raised KeyError: " in str(scheme.verify(examples=1, tp=2).failure)
    state = sys.modules["a_state_of_failing"]
    assert state.RANK == -1 and not hasattr(state, "NEW")


LOSS_PARALLEL = """
import jax
import jax.numpy as jnp
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from shardproof import scheme, token_below, values

def cross_entropy(logits, target):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], -1)[:, 0].sum()[None]

@scheme(reference=cross_entropy, mesh={"tp": (2, 4)}, inputs={"logits": "b v/tp", "target": "b"}, outputs="1 tp=I",
        draw={"target": token_below("v"), "logits": values("normal")}, dtypes=("float32",), reduction=("b", "v"),
        around=lambda mesh: loss_parallel())
def loss_of_a_sharded_vocabulary(mesh, logits, target):
    sharded = DTensor.from_local(logits, mesh.device_mesh, [Shard(1)], run_check=False)
    return F.cross_entropy(sharded, target, reduction="sum").to_local().reshape(1)
"""


# Torch wants the backward inside too, unless the targets are a DTensor.
IN_THE_BODY = LOSS_PARALLEL.replace(",\n        around=lambda mesh: loss_parallel()", "").replace(
    "    return F.cross_entropy(sharded, target,",
    "    target = DTensor.from_local(target, mesh.device_mesh, [Replicate()], run_check=False)\n"
    "    with loss_parallel():\n        return F.cross_entropy(sharded, target,",
)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("engine", "text"),
    [("lockstep", LOSS_PARALLEL), ("lockstep", IN_THE_BODY), ("gloo", LOSS_PARALLEL)],
    ids=["lockstep", "lockstep, in the body", "gloo"],
)
def test_loss_parallel_patches_each_rank_separately(engine, text, tmp_path):
    (tmp_path / "loss.py").write_text(text)
    (scheme,) = schemes_of_file(str(tmp_path / "loss.py"))
    report = scheme.verify(engine, examples=3, tp=4)
    assert report.ok, report
