"""The rows of a cache: all that is kept of one token, in every layer, by its slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import gcd

import torch

from anabranch.llm.runner.kv_cache import LayerCache


def token_rows(cache: LayerCache) -> Iterator[torch.Tensor]:
    """Bytes [num_slots, row_bytes] of each of a layer's tensors that has a row for every slot.

    Keys, values and scales of a token are such rows; a scale of a whole tensor is not. Scales that
    lie heads first are rows of each head.
    """
    seen = set[int]()
    for value in cache.tensors():
        if value is None or value.shape[:2] != cache.k.shape[:2]:
            continue
        memory = value.untyped_storage().data_ptr()
        if memory not in seen:  # values may be columns of the keys
            seen.add(memory)
            num_slots = value.shape[0] * value.shape[1]
            has_rows = value.is_contiguous() and value.shape[2] > 1
            for part in [value] if has_rows else value.unbind(2):
                yield part.view(num_slots, -1).view(torch.uint8)


class CacheRows:
    """Rows of all layers, and where they begin in device memory."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self._rows = [rows for cache in caches for rows in token_rows(cache)]
        places = [(rows.data_ptr(), rows.shape[1]) for rows in self._rows]
        self.word_bytes = gcd(8, *chain.from_iterable(places))
        table = [(address, row_bytes // self.word_bytes) for address, row_bytes in places]
        self.table = torch.tensor(table, dtype=torch.int64, device=self._rows[0].device)
        self.longest = max(words for _, words in table)

    def move(self, slots: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Move accepted nodes of trees next to the context, all on the device.

        The node `path[seq, depth]` lies at `slots[seq, path[seq, depth]]` and is copied to
        `slots[seq, depth]`, for every depth from 1 to `num_accepted[seq]`.
        """
        if slots.is_cuda:
            from anabranch.kernels.triton.move_rows import move_rows

            stores = self.table, self.longest, self.word_bytes
            move_rows(*stores, slots, path, num_accepted)
        else:
            from anabranch.kernels.cpu.move_rows import move_rows

            move_rows(self._rows, slots, path, num_accepted)
