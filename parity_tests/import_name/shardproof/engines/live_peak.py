"""The peak memory of torch code: the most bytes alive at one time in storages that its operations made.

Earlier storages are not counted, nor memory that an operation frees before it returns.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves


class LivePeak(TorchDispatchMode):
    """Counts the bytes of storages made inside it on this thread: `now` are alive, and at most `most` were."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor runs first and comes back here with its local tensors
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, was_before=True)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self._note(tensor, was_before=False)
        return out

    def _note(self, tensor: Any, was_before: bool) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = 0 if was_before else storage.nbytes()
        weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
