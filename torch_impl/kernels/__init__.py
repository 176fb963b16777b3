"""Triton kernels behind plain functions, each with an eager equivalent; Triton is imported at first use."""

from torch_impl.kernels.backend import BACKENDS as BACKENDS
from torch_impl.kernels.backend import checked_backend as checked_backend
from torch_impl.kernels.backend import compiled as compiled
