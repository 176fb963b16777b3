"""Every kernel compiles to machine code for GPUs, keeps its tile in registers, and reads 8 or 16 bytes at once.

A kernel's numbers and speed need a run on a GPU: see `test_devices.py` and the benchmarks.
"""

import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="not run: needs triton; pip install -e '.[triton]' in the clone")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_impl.kernels import softmax

ARCHITECTURES = (80, 90)
ALIGNED = [["tt.divisibility", 16]]
UNALIGNED = ("column_ptr", "k", "temperature")
SETTINGS = dict(HAS_TEMPERATURE=True, WITH_ENTROPY=True)
NUMBERS = "n v k entropy_offset row_stride out_row_stride"
ACCUMULATED = "row_max log_row_sum shifted_mean g_entropy g_same g_total g_other"  # each _ptr


def compiled(kernel, architecture, logits, accumulator, constants, **options):
    """The kernel for pointers to such dtypes, all aligned; other arguments that are not constants are int32."""
    names = kernel.arg_names
    types = dict.fromkeys(NUMBERS.split(), "i32") | {f"{name}_ptr": f"*{accumulator}" for name in ACCUMULATED.split()}
    types |= dict.fromkeys(("logits_ptr", "z_t_ptr", "out_ptr"), f"*{logits}")
    types |= {"column_ptr": "*i32", "temperature": "fp64"}
    if kernel is softmax._statistics:
        types["out_ptr"] = f"*{accumulator}"
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): ALIGNED for i, name in enumerate(names) if name not in constants and name not in UNALIGNED},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


KERNELS = {
    "statistics": (
        softmax._statistics,
        dict(WITH_ENTROPY=True, column_stride=1, STEP=softmax.STATISTICS_STEP, IDS=1),
        softmax.STATISTICS_WARPS,
    ),
    "gradient": (
        softmax._gradient,
        dict(SETTINGS, IS_NORMALISED=True, column_stride=1, out_column_stride=1, STEP=softmax.GRADIENT_STEP, IDS=1),
        softmax.GRADIENT_WARPS,
    ),
    "gradient, several ids": (
        softmax._gradient,
        dict(SETTINGS, IS_NORMALISED=True, column_stride=1, out_column_stride=1, STEP=softmax.GRADIENT_STEP, IDS=4),
        softmax.GRADIENT_WARPS,
    ),
    "gradient at ids": (
        softmax._gradient_at_ids,
        dict(SETTINGS, IS_NORMALISED=True, out_column_stride=1, IDS=4),
        4,
    ),
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def stack_bytes(binary, folder):
    """Bytes of local memory a thread needs beyond its registers."""
    file = Path(folder) / "kernel.cubin"
    file.write_bytes(binary)
    tool = resources.files(triton) / "backends" / "nvidia" / "bin" / "cuobjdump"
    result = subprocess.run([str(tool), "-res-usage", str(file)], capture_output=True, text=True, check=True)
    return [int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", result.stdout + result.stderr)]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("logits", "accumulator"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_spills_nothing_and_moves_several_words_at_once(name, logits, accumulator, architecture, tmp_path):
    kernel, constants, warps = KERNELS[name]
    binary = compiled(kernel, architecture, logits, accumulator, constants, num_warps=warps)
    sizes = stack_bytes(binary.asm["cubin"], tmp_path)
    assert sizes and set(sizes) == {0}
    if name != "gradient at ids":
        # A thread of the statistics has four columns of a step: more steps are in flight, and less of a register each.
        width = "[24]" if name == "statistics" else "4"
        assert re.search(rf"ld\.global\S*\.v{width}\.b32", binary.asm["ptx"])
    if name.startswith("gradient") and name != "gradient at ids":
        assert re.search(r"st\.global\S*\.v4\.b32", binary.asm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_float64(name):
    kernel, constants, warps = KERNELS[name]
    assert compiled(kernel, 90, "fp64", "fp64", constants, num_warps=warps).asm["cubin"]
