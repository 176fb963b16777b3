"""What collectives reject, each call with words of its message, on every rank before anything is sent."""

from functools import partial

import pytest
from jaxtyping import Int
from torch import Tensor

from parity_tests.collectives.test_errors import CALLS
from parity_tests.rejections import codes, declared
from shardproof import check_cases, scheme

OF_THE_MESH = (
    (lambda mesh: mesh["tpp"], "ValueError: mesh: axis 'tpp' is not in mesh ("),
    (lambda mesh: mesh.size("tpp"), "); did you mean 'tp'?"),
    (lambda mesh: mesh.rank("stage"), "ValueError: mesh: axis 'stage' is not in mesh ("),
    (lambda mesh: mesh.total("d"), "ValueError: mesh: dim 'd' is not known here (r)"),
    (lambda mesh: mesh.bind({}).global_ids("r"), "ValueError: mesh: dim 'r' is not known here (none is)"),
)


@scheme(**declared("tp", (2,), len(CALLS) + len(OF_THE_MESH)))
def rejected_by_collectives(mesh, ids) -> Int[Tensor, "k r/tp"]:
    group, rank = mesh["tp"], mesh.rank("tp")
    calls = [(partial(call, group), text.format(rank=rank)) for call, text in CALLS]
    return codes(ids, [*calls, *((partial(call, mesh), words) for call, words in OF_THE_MESH)])


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_rejections(engine):
    check_cases(rejected_by_collectives, 3, engine=engine)
