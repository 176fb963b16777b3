"""Which backend is chosen for which device, and which names are rejected."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_impl.contract import contract
from torch_impl.kernels import backend, checked_backend

pytest.importorskip("triton", reason="not run: needs triton; pip install -e '.[triton]' in the clone")
ON_CPU = torch.ones(2)


class OnCuda:
    """The attributes that are read of a tensor on a GPU."""

    is_cuda, device = True, torch.device("cuda")


@pytest.mark.parametrize(
    ("backend", "x", "chosen"),
    [
        ("auto", ON_CPU, "eager"),
        ("eager", ON_CPU, "eager"),
        ("compile", ON_CPU, "compile"),
        ("auto", OnCuda, "triton"),
        ("triton", OnCuda, "triton"),
        ("eager", OnCuda, "eager"),
        ("compile", OnCuda, "compile"),
    ],
)
def test_the_device_decides_without_a_backend(backend, x, chosen):
    assert checked_backend(backend, "x", x) == chosen


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("cuda", "backend='cuda' is not one of auto, eager, compile, triton"),
        (
            "triton",
            "backend='triton' runs on CUDA but x is on cpu; use 'auto', 'eager' or 'compile', or set "
            "TRITON_INTERPRET=1 before triton is first imported",
        ),
    ],
)
def test_rejections(backend, text):
    with pytest.raises(ValueError) as caught:
        checked_backend(backend, "x", ON_CPU)
    assert str(caught.value) == text


@contract("vocab_parallel.logprob")
def logprob(backend, x):
    return checked_backend(backend, "vocab_parallel_logits", x)


@pytest.mark.parametrize(
    ("backend", "x", "which"),
    [("triton", ON_CPU, "backend='triton' needs triton"), ("auto", OnCuda, "backend='auto' on CUDA needs triton")],
)
def test_without_triton_the_extra_is_named(backend, x, which, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError) as caught:
        logprob(backend, x)
    assert str(caught.value) == (
        f"vocab_parallel.logprob: {which}; pip install -e '.[triton]' in the clone, or use 'eager' or 'compile'"
    )


@pytest.mark.slow
def test_triton_is_imported_by_who_asks_for_it():
    program = "import sys, torch_impl.vocab_parallel, torch_impl.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_no_environment_variable_is_read():
    files = Path(inspect.getfile(backend)).parent.glob("*.py")
    assert [file.name for file in files if "import os" in file.read_text()] == []
