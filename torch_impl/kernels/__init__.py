"""Triton kernels behind plain functions, each with its eager twin; Triton is imported when it is first asked for."""

from torch_impl.kernels.backend import BACKENDS as BACKENDS
from torch_impl.kernels.backend import checked_backend as checked_backend
from torch_impl.kernels.backend import compiled as compiled
from torch_impl.kernels.rows import rows_at as rows_at
