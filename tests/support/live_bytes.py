"""The memory of tensors made within a block, at its peak."""

from __future__ import annotations

from typing import Any
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of new tensors that are alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            if storage._cdata in given or storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, name: int, num_bytes: int) -> None:
        self._known.discard(name)
        self.alive -= num_bytes
