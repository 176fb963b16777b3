"""The vocabulary of styles: each name is a style or a refusal."""

import pytest
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from torch_impl.parallelizer import translate_to_torch_parallel_style
from torch_impl.parallelizer.tp_styles import REFUSED, STYLES


def test_every_name_that_transformers_registers_is_known():
    assert set(ALL_PARALLEL_STYLES.keys()) <= {*STYLES, *REFUSED}


@pytest.mark.parametrize("name", STYLES)
def test_each_call_makes_an_object(name):
    first, second = translate_to_torch_parallel_style(name), translate_to_torch_parallel_style(name)
    assert first is not second and type(first) is type(second)
