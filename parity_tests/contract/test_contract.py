"""A signature's contract: accepted values, the sentence of each rejection, and where checks cost nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from torch_impl.contract import (
    Dtype,
    Function,
    GradientType,
    Group,
    Instance,
    ListOf,
    Names,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Sharded,
    ShardedBool,
    ShardedIds,
    ShardedInt,
    TypeProblem,
    contract,
    contract_of,
    is_integer,
    read_contract,
    sentence_about,
    spec_line,
    type_name,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
LOGITS, IDS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)


@contract("scores.score")
def score(
    logits: Sharded[Tensor, "... v/tp"] | DTensor,
    ids: ShardedIds[Tensor, "..."],
    weight: Sharded[Tensor, "d v/tp"] | None = None,
    *,
    temperature: Positive = 1.0,
    margin: NonNegative = 0.0,
    chunk_size: PositiveInt | None = None,
    skip: NonNegativeInt = 0,
    backend: Literal["auto", "eager"] = "auto",
    with_entropy: bool = False,
    label: str = "",
    rows: int = 1,
    gradient: GradientType = "I",
    blocks: Sharded[Tensor, "n/cp ..."] | None = None,
    anything: Any = None,
) -> Sharded[Tensor, "... tp=I"] | tuple[Sharded[Tensor, "... tp=I"], Sharded[Tensor, "... tp=I"]]:
    return logits.sum(-1) * temperature


@contract
def over_ranks(
    x: Sharded[Tensor, "b s 1"],
    mask: ShardedBool[Tensor, "b s"],
    offsets: ShardedInt[Tensor, "n"],
    tp_group: Group[ProcessGroup, "tp"],
    group: Group[ProcessGroup, "axis"] | None = None,
):
    return x


class Doubled(torch.autograd.Function):
    @staticmethod
    @contract
    def forward(ctx: Any, x: Sharded[Tensor, "b s/cp"], times: PositiveInt = 2) -> Sharded[Tensor, "b s/cp"]:
        return x * times

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        return g * 2, None


NARROW = torch.float8_e5m2
REJECTED = [
    (TypeError, (1, IDS), {}, "logits is an int; pass a Tensor"),
    (TypeError, (None, IDS), {}, "logits is None; pass a Tensor"),
    (TypeError, (IDS, IDS), {}, "logits is int64; logits must be floating"),
    (TypeError, (LOGITS.to_sparse(), IDS), {}, "logits is of layout sparse_coo; pass a dense tensor"),
    (TypeError, (LOGITS.to(NARROW), IDS), {}, "logits is float8_e5m2, for which torch has few operations; convert it"),
    (ValueError, (LOGITS, IDS.to("meta")), {}, "ids is on meta but logits on cpu; pass one device"),
    (ValueError, (torch.tensor(1.0), IDS), {}, "logits has no dims; the last one must be the vocabulary"),
    (TypeError, (LOGITS, LOGITS), {}, "ids is float32; ids must be int32 or int64"),
    (TypeError, (LOGITS, IDS.bool()), {}, "ids is bool; ids must be int32 or int64"),
    (ValueError, (LOGITS, IDS[:1]), {}, "ids is [1, 3] but logits has leading shape [2, 3]"),
    (ValueError, (LOGITS, IDS[0]), {}, "ids is [3] but logits has leading shape [2, 3]"),
    (ValueError, (LOGITS, IDS, LOGITS), {}, "weight is [2, 3, 4]; its dims must be [d v/tp]; reshape it to these"),
    (
        ValueError,
        (LOGITS, IDS, LOGITS[0, :, :2]),
        {},
        "weight is [3, 2] but logits has v/tp=4: v/tp differs, 2 and 4",
    ),
    (ValueError, (LOGITS, IDS), {"temperature": 0}, "temperature=0 must be positive"),
    (ValueError, (LOGITS, IDS), {"temperature": float("nan")}, "temperature=nan must be finite"),
    (ValueError, (LOGITS, IDS), {"temperature": float("inf")}, "temperature=inf must be finite"),
    (ValueError, (LOGITS, IDS), {"temperature": np.float64("inf")}, "temperature=inf must be finite"),
    (ValueError, (LOGITS, IDS), {"temperature": np.float32("inf")}, "temperature=inf must be finite"),
    (ValueError, (LOGITS, IDS), {"temperature": 10**400}, f"temperature={10**400} must be finite"),
    (TypeError, (LOGITS, IDS), {"temperature": "1"}, "temperature='1' is a str; pass a number"),
    (TypeError, (LOGITS, IDS), {"temperature": True}, "temperature=True is a bool; pass a number"),
    (ValueError, (LOGITS, IDS), {"margin": -0.5}, "margin=-0.5 must be at least 0"),
    (ValueError, (LOGITS, IDS), {"chunk_size": 0}, "chunk_size=0 must be at least 1"),
    (TypeError, (LOGITS, IDS), {"chunk_size": 2.5}, "chunk_size=2.5 is a float; pass an int"),
    (TypeError, (LOGITS, IDS), {"chunk_size": True}, "chunk_size=True is a bool; pass an int"),
    (ValueError, (LOGITS, IDS), {"skip": -1}, "skip=-1 must be at least 0"),
    (TypeError, (LOGITS, IDS), {"skip": None}, "skip=None is None; pass an int"),
    (ValueError, (LOGITS, IDS), {"backend": "cuda"}, "backend='cuda' is not one of auto, eager"),
    (TypeError, (LOGITS, IDS), {"with_entropy": 1}, "with_entropy=1 is an int; pass True or False"),
    (TypeError, (LOGITS, IDS), {"label": 3}, "label=3 is an int; pass a str"),
    (TypeError, (LOGITS, IDS), {"rows": "3"}, "rows='3' is a str; pass an int"),
    (
        ValueError,
        (LOGITS, IDS),
        {"blocks": torch.tensor(1.0)},
        "blocks is []; its dims must be [n/cp ...]; reshape it to these",
    ),
    (
        ValueError,
        (LOGITS, IDS),
        {"gradient": "P"},
        "gradient='P' is not the gradient type of a replicated result; "
        "write 'R' (gradients add up) or 'I' (same gradient)",
    ),
]


@pytest.mark.parametrize(("error", "args", "kwargs", "message"), REJECTED)
def test_a_rejection_names_the_function_the_argument_and_the_remedy(error, args, kwargs, message):
    with pytest.raises(error) as caught:
        score(*args, **kwargs)
    assert str(caught.value) == f"scores.score: {message}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((LOGITS, IDS > 0, IDS[0], None), "x is [2, 3, 4]; dim 2 must have size 1"),
        ((LOGITS[..., :1], IDS, IDS[0], None), "mask is int64; it must be bool"),
        ((LOGITS[..., :1], IDS[:1] > 0, IDS[0], None), "mask is [1, 3] but x has b=2: b differs, 1 and 2"),
        ((LOGITS[..., :1], IDS > 0, LOGITS[0, 0], None), "offsets is float32; it must be integers"),
        (
            (LOGITS[..., :1], IDS > 0, IDS[0], None),
            "tp_group is None; pass a ProcessGroup (a group of size 1 for no tensor parallelism)",
        ),
    ],
)
def test_a_default_name_is_the_component_and_the_function(args, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        over_ranks(*args)
    assert str(caught.value) == f"contract.over_ranks: {message}"


def test_a_problem_is_put_after_the_argument_and_keeps_its_type():
    assert sentence_about("k", None) is None
    assert sentence_about("k", "=9 is above e=8") == "k=9 is above e=8"
    assert isinstance(sentence_about("names", TypeProblem("[1] is an int")), TypeProblem)


def test_values_in_range_are_accepted():
    options = dict(temperature=2, margin=0, chunk_size=1, skip=0, backend="eager", with_entropy=True, label="x")
    assert score(LOGITS, IDS, torch.zeros(7, 4), rows=0, anything=object(), **options).shape == (2, 3)
    assert score(LOGITS[0, 0], IDS[0, 0], gradient="R", blocks=torch.zeros(3, 1, 2)).shape == ()
    assert score(LOGITS, IDS.int(), None, chunk_size=None).shape == (2, 3)


def test_a_type_that_is_not_imported_is_known_by_its_name():
    class DTensor:
        def sum(self, dim):
            return torch.ones(())

    assert score(DTensor(), IDS) == 1.0


def test_python_misses_what_python_misses():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'ids'"):
        score(LOGITS)


def test_an_autograd_function_is_named_by_its_class():
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert gradient.tolist() == [[2.0] * 3] * 2
    with pytest.raises(
        ValueError, match=r"^contract.Doubled: x is \[3\]; its dims must be \[b s/cp\]; reshape it to these$"
    ):
        Doubled.apply(torch.ones(3))


@contract("scores.inner")
@torch.inference_mode()  # its wrapper is defined in another module, which knows no PositiveInt
def inner(rows: PositiveInt) -> int:
    return rows


def test_a_decorator_below_hides_no_annotation():
    assert inner(1) == 1
    with pytest.raises(ValueError, match=r"^scores.inner: rows=0 must be at least 1$"):
        inner(0)


class Base:
    def __init__(self, size: int) -> None:
        self.size = size


class Derived(Base):
    @contract("scores.Derived")
    def __init__(self, size: PositiveInt) -> None:
        super().__init__(size)


def test_a_constructor_may_call_that_of_its_base():
    assert Derived(2).size == 2
    with pytest.raises(ValueError, match=r"^scores.Derived: size=0 must be at least 1$"):
        Derived(0)


def test_the_spec_line_matches_the_signature():
    forms = '"... tp=I"  or  "... tp=I", "... tp=I"'
    assert spec_line(score) == f'logits "... v/tp"   ids "..."   weight "d v/tp"   blocks "n/cp ..."   ->   {forms}'
    assert spec_line(Doubled) == 'x "b s/cp"   ->   "b s/cp"'
    assert contract_of(len) is None and spec_line(len) == ""

    def annotated(x: Sharded[Tensor, "n/tp"], times: int = 2) -> Sharded[Tensor, "n/tp"]:
        return x * times

    assert contract_of(annotated) is None
    assert read_contract(annotated).inputs == {"x": "n/tp"} and read_contract(annotated).outputs == (("n/tp",),)


def test_a_contract_breaks_no_graph():
    compiled = torch.compile(score, fullgraph=True, backend="eager")
    for shape in ((2, 3, 4), (5, 4, 6)):
        x, ids = torch.ones(shape), torch.zeros(shape[:-1], dtype=torch.int64)
        assert torch.equal(compiled(x, ids, temperature=2.0, chunk_size=3), score(x, ids, temperature=2.0))


def test_a_contract_reads_no_value():
    with FakeTensorMode():
        assert score(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)
    assert torch.vmap(lambda x, ids: score(x, ids))(LOGITS, IDS).shape == (2, 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_leading_dims_agree_or_are_rejected(shape, axis, differs):
    ids_shape = list(shape[:-1])
    if differs and ids_shape:
        ids_shape[axis % len(ids_shape)] += 1
    ids = torch.zeros(ids_shape, dtype=torch.int64)
    if ids_shape == shape[:-1]:
        assert score(torch.zeros(shape), ids).shape == tuple(ids_shape)
    else:
        with pytest.raises(ValueError, match="leading shape"):
            score(torch.zeros(shape), ids)


def test_numbers_and_names_load_no_torch():
    program = "import sys; from torch_impl.contract import PositiveInt, contract; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_a_type_is_named_with_its_article():
    assert [type_name(value) for value in (None, 1, "x", 0.5, [])] == ["None", "an int", "a str", "a float", "a list"]


@contract("lists.run")
def run_lists(names: Names | None = None, step: Function | None = None, dtype: Dtype = torch.float32) -> None:
    """Lists, functions and dtypes."""


@pytest.mark.parametrize(
    ("error", "kwargs", "message"),
    [
        (TypeError, {"names": "visual"}, "names='visual' is a str; pass a list of names"),
        (TypeError, {"names": ["visual", 3]}, "names[1]=3 is an int; pass a str"),
        (TypeError, {"step": 3}, "step=3 is an int; pass a function"),
        (TypeError, {"dtype": "float32"}, "dtype='float32' is a str; pass a torch.dtype"),
    ],
)
def test_lists_functions_and_dtypes(error, kwargs, message):
    run_lists(["visual"], len, torch.bfloat16)
    with pytest.raises(error, match=f"^lists.run: {re.escape(message)}$"):
        run_lists(**kwargs)


def test_a_list_that_must_not_be_empty():
    stages = ListOf(Instance(Tensor, "pass a Tensor", shows_value=False), "tensors", if_empty="pass one for each rank")
    assert stages.problem([LOGITS]) is None
    assert stages.problem([]) == " is empty; pass one for each rank"
    problem = stages.problem([LOGITS, 1])
    assert problem == "[1] is an int; pass a Tensor" and isinstance(problem, TypeProblem)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.uint8, True),
        (torch.int16, True),
        (torch.int64, True),
        (torch.bool, False),
        (torch.float8_e4m3fn, False),
        (torch.bfloat16, False),
        (torch.complex64, False),
    ],
)
def test_which_tensors_are_of_integers(dtype, expected):
    assert is_integer(torch.zeros(1, dtype=dtype)) is expected
