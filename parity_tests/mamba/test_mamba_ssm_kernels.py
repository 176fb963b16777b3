"""mamba.mamba_ssm_kernels: which kernels are used, and their arguments."""

import importlib
import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from parity_tests.mamba.outside import NEEDS, is_installed, outside
from torch_impl.mamba import mamba_ssm_kernels, mix, scan
from torch_impl.mamba.mix import causal_conv
from torch_impl.mamba.scan import chunked_scan

ROOT = Path(__file__).resolve().parents[2]
on_the_packages = pytest.mark.skipif(not is_installed(), reason=NEEDS)
# Integers, whose sums are exact in any order.
X = (torch.arange(2.0 * 7 * 8) * 5 % 7 - 3).view(2, 7, 8)
WEIGHT = (torch.arange(8.0 * 4) * 3 % 5 - 2).view(8, 4)
BIAS = torch.arange(8.0)
WIDER = torch.cat([X, X[..., :3]], -1)
IDS = (torch.arange(7) >= 3).long().expand(2, 7)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """One that imports and one that does not."""
    for name, text in {"sound": "def scan(): ...", "broken": "import no_such_module"}.items():
        (tmp_path / f"{name}_kernels.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    mamba_ssm_kernels.import_function.cache_clear()
    yield
    mamba_ssm_kernels.import_function.cache_clear()


def test_a_package_is_used_where_it_imports(packages):
    assert mamba_ssm_kernels.import_function("sound_kernels", "sound_kernels", "scan").__name__ == "scan"
    assert mamba_ssm_kernels.import_function("absent_kernels", "absent_kernels", "scan") is None
    with pytest.warns(UserWarning, match="mamba: broken_kernels is installed and does not import .*no_such_module.*"):
        assert mamba_ssm_kernels.import_function("broken_kernels", "broken_kernels", "scan") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mamba_ssm_kernels.import_function("broken_kernels", "broken_kernels", "scan") is None


class OnCuda:
    """Says that it is a CUDA tensor."""

    is_cuda = True

    def __init__(self, shape, dtype=torch.float32):
        self.shape, self.dtype = torch.Size(shape), dtype

    def numel(self):
        return self.shape.numel()


def test_inputs_that_a_kernel_would_narrow_or_reject_are_not_passed_to_it(monkeypatch):
    monkeypatch.setattr(mamba_ssm_kernels, "import_function", lambda *_: "kernel")
    x, B = OnCuda((1, 4, 2, 3)), OnCuda((1, 4, 1, 5))
    scan_of, conv_of = mamba_ssm_kernels.scan_kernel, mamba_ssm_kernels.conv_kernel
    assert scan_of(x, B, B) == "kernel"
    assert scan_of(torch.zeros(1, 4, 2, 3), B, B) is None
    assert scan_of(OnCuda((1, 0, 2, 3)), B, B) is None
    assert scan_of(OnCuda(x.shape, torch.float64), *[OnCuda(B.shape, torch.float64)] * 2) is None
    narrow = OnCuda(B.shape, torch.bfloat16)
    assert [scan_of(OnCuda(x.shape, torch.bfloat16), B, B), scan_of(x, narrow, B), scan_of(x, B, narrow)] == [None] * 3
    rows, weight = OnCuda((1, 4, 8)), OnCuda((8, 4))
    assert conv_of(rows, weight) == "kernel"
    assert conv_of(torch.zeros(1, 4, 8), weight) is None
    assert conv_of(OnCuda((1, 4, 8), torch.float64), weight) is None
    assert conv_of(OnCuda((1, 4, 12)), OnCuda((12, 4))) is None and conv_of(OnCuda((0, 4, 8)), weight) is None
    assert conv_of(rows, OnCuda((8, 4), torch.float64)) is None
    assert conv_of(rows, OnCuda((8, 5))) is None and conv_of(rows, OnCuda((8, 1))) is None


def conv_that_checks(x, weight, bias=None, seq_idx=None, activation=None):
    """causal-conv1d in plain torch, with its kernel's rejections first."""
    assert x.stride(1) == 1 and x.stride(0) % 8 == x.stride(2) % 8 == x.shape[1] % 8 == 0
    assert x.dtype in mamba_ssm_kernels.DTYPES and 2 <= weight.shape[1] <= 4
    assert bias is None or (bias.dtype == weight.dtype and bias.stride(-1) == 1)
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
    return outside().conv.causal_conv1d_ref(x, weight, bias, seq_idx=seq_idx, activation=activation)


@on_the_packages
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("rows", [X, WIDER[..., :8], WIDER[:1, :1, :8]])
def test_the_convolution_gets_its_own_arguments(rows, ids):
    ids = None if ids is None else ids[: len(rows), : rows.shape[1]]
    for bias in (BIAS, None):
        out = mamba_ssm_kernels.kernel_conv(conv_that_checks, rows, WEIGHT, bias, ids)
        assert torch.equal(out, causal_conv(rows, WEIGHT, bias, ids))


@on_the_packages
def test_the_arguments_are_theirs():
    """Those that the stand-ins here take, in the order in which they are given."""
    of_conv = list(inspect.signature(outside().conv.causal_conv1d_fn).parameters)
    assert of_conv[:4] == ["x", "weight", "bias", "seq_idx"] and "activation" in of_conv
    of_scan = list(inspect.signature(outside().scan.mamba_chunk_scan_combined).parameters)
    assert of_scan[:6] == ["x", "dt", "A", "B", "C", "chunk_size"]
    assert {"D", "seq_idx", "initial_states", "return_final_states"} <= set(of_scan)


def test_a_number_for_each_channel_is_one_for_each_of_a_head():
    parts = X[..., None].expand(2, 7, 8, 3), X.exp(), -WEIGHT[:, 0].exp(), X[..., None, :2], X[..., None, 2:4]
    seen = []

    def kernel(*args, D, **options):
        seen.append(D.shape)
        return args[0], None

    for D in (BIAS, BIAS[:, None], torch.arange(24.0), torch.arange(24.0).view(8, 3)):
        mamba_ssm_kernels.kernel_scan(kernel, *parts, D, 4, None, None)
        assert chunked_scan(*parts, D, chunk_size=4)[0].shape == (2, 7, 8, 3)
    assert seen == [(8,), (8,), (8, 3), (8, 3)]


def test_an_installed_kernel_gets_the_arguments(monkeypatch):
    """Each in its place, by the functions that ask for one."""
    calls = []
    for module, kernel, caller in ((mix, "conv_kernel", "kernel_conv"), (scan, "scan_kernel", "kernel_scan")):
        monkeypatch.setattr(module, kernel, lambda *arguments_: calls.append(arguments_) or "kernel")
        monkeypatch.setattr(module, caller, lambda *arguments_: arguments_)
    rows = X, WEIGHT, BIAS, IDS
    x, dt, A, B, C, D = X[..., None], X.exp(), -WEIGHT[:, 0].exp(), X[:, :, None, :2], X[:, :, None, 2:4], BIAS
    states = torch.zeros(2, 8, 1, 2)
    outputs = causal_conv(*rows), chunked_scan(x, dt, A, B, C, D, chunk_size=3, seq_idx=IDS, initial_states=states)
    arguments = ("kernel", *rows), ("kernel", x, dt, A, B, C, D, 3, IDS, states)
    for passed, expected in zip((*outputs, *calls), (*arguments, rows[:2], (x, B, C)), strict=True):
        assert all(ours is theirs for ours, theirs in zip(passed, expected, strict=True))


def test_a_kernel_gets_the_dtypes_and_strides_that_it_takes():
    """Sequences as int32 that count from 0, since the first begins with the initial state; one dtype of a row's own."""
    x, passed = X[..., None].expand(2, 7, 8, 3), {}

    def kernel(x, dt, A, B, C, chunk_size, **options):
        passed.update(options, strides=(x.is_contiguous(), dt.is_contiguous(), B.is_contiguous(), C.is_contiguous()))
        return x, None

    parts = X.exp().mT.contiguous().mT, -WEIGHT[:, 0].exp(), WIDER[:, :, None, :2], WIDER[:, :, None, 2:4]
    mamba_ssm_kernels.kernel_scan(kernel, x, *parts, None, 4, IDS + 5, None)
    assert torch.equal(passed["seq_idx"], IDS.int()) and passed["seq_idx"].dtype == torch.int32
    assert passed["strides"] == (True,) * 4

    def conv_kernel(x, weight, bias, **options):
        passed.update(options, kinds=(weight.dtype, bias.dtype), is_whole=weight.is_contiguous())
        return x

    rows = mamba_ssm_kernels.kernel_conv(conv_kernel, X.bfloat16(), WEIGHT.T.contiguous().T.bfloat16(), BIAS, IDS)
    assert passed["kinds"] == (torch.bfloat16, torch.bfloat16) and passed["is_whole"]
    assert passed["seq_idx"].dtype == torch.int32 and passed["seq_idx"].is_contiguous()
    assert torch.equal(rows, X.bfloat16())


@pytest.mark.slow
@on_the_packages
@pytest.mark.timeout(600)
def test_the_kernels_of_the_scan_equal_the_reference():
    """On CUDA where there is one, else in Triton's interpreter."""
    pytest.importorskip("triton", reason="not run: needs triton; pip install -e '.[triton]' in the clone")
    settings = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "parity_tests.mamba.scan_kernel"]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and " passed on " in run.stdout, run.stdout[-5000:] + run.stderr[-5000:]
