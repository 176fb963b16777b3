"""Errors of torch's own: a kernel that adds up a gradient in 16 bits, though no line of the function asks for it.

On a CPU the gradients of layer_norm's weight and bias are running sums over rows in the dtype of these two. No number
of declared roundings mends a long one, so the note says which call it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from shardproof.declare.declared import Declared
from shardproof.explain.arithmetic import WITHIN_ROUNDING
from shardproof.explain.note import ROUNDING, Note
from shardproof.report.report import Report
from shardproof.verify_one_case import NARROW, verify_case

Notes = Mapping[str, tuple[Note, ...]]


def name_narrow_kernels(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes, of which the first names a call of layer_norm whose gradient is right in float32.

    Cost: one run, if a gradient is wrong in 16 bits.
    """
    by_label, dtype = dict(notes), report.case.dtype
    wrong = [tensor.label for tensor in report.tensors if tensor.role == "gradient" and not tensor.ok]
    if dtype not in NARROW or not wrong:
        return by_label
    with _layer_norm_in_float32():
        other = verify_case(scheme, report.case)
    right = {tensor.label for tensor in other.tensors if tensor.ok}
    claim = f"{WITHIN_ROUNDING}torch's layer_norm may do: on a CPU it adds rows of these gradients in {dtype}"
    for label in right.intersection(wrong):
        by_label[label] = (Note(f"{claim}; call it with float32 tensors", ROUNDING), *by_label[label])
    return by_label


@contextmanager
def _layer_norm_in_float32() -> Iterator[None]:
    """Replace the kernel of its backward by torch's decomposition of it, which computes in float32."""
    from torch._decomp.decompositions import native_layer_norm_backward

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that a kernel is replaced
        library.impl("native_layer_norm_backward", native_layer_norm_backward, "CPU")
        yield
