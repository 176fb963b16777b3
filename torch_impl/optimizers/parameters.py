"""The parameters that an optimizer takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from torch_impl.contract import Instance

Parameters = Annotated[Any, Instance(Iterable, "pass tensors or parameter groups", shows_value=False)]
