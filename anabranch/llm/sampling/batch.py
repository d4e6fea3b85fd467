"""What goes into a sampling step and comes out of it, and the copies between host and device.

Many small arrays travel in one copy, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.compositions.tree import check_tree_order, node_depths
from anabranch.llm.sampling.logprobs import Logprobs

Array = np.ndarray[Any, np.dtype[Any]]
_ALIGNMENT = 8
_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def upload(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on the device, by one copy from pinned memory."""
    starts, num_bytes = dict[str, int](), 0
    for name, array in arrays.items():
        starts[name] = num_bytes
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = staged.numpy()
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory[starts[name] : starts[name] + raw.size] = raw
    arrived = staged.to(device, non_blocking=True)
    return {
        name: arrived[starts[name] : starts[name] + array.nbytes]
        .view(_DTYPES[array.dtype.name])
        .view(array.shape)
        for name, array in arrays.items()
    }


@dataclass(frozen=True, slots=True)
class Download:
    """A copy to the host under way."""

    _words: Tensor  # int32, pinned if it comes from a GPU
    _layout: dict[str, tuple[torch.Size, bool]]  # shape, and whether it is of floats
    _arrival: torch.cuda.Event | None

    def wait(self) -> dict[str, Array]:
        """The arrays as int32 or float32, once they are here."""
        if self._arrival is not None:
            self._arrival.synchronize()
        arrays, start = dict[str, Array](), 0
        for name, (shape, is_float) in self._layout.items():
            words = self._words[start : start + shape.numel()].numpy().reshape(shape)
            arrays[name] = words.view(np.float32) if is_float else words
            start += shape.numel()
        return arrays


def download(tensors: Mapping[str, Tensor]) -> Download:
    """Starts to copy tensors of integers below 2^31 and of float32 to the host, in one copy."""
    layout = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}
    words = torch.cat([_words(tensor) for tensor in tensors.values()])
    if words.device.type != "cuda":
        return Download(words, layout, None)
    pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
    pinned.copy_(words, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(words.device))
    return Download(pinned, layout, arrival)


def _words(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.float().reshape(-1).view(torch.int32)
    return tensor.int().reshape(-1)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be chosen in some rows of logits, a bit for each, the lowest first."""

    rows: Array  # int64 [num_masked]
    words: Tensor  # int32 [num_masked, ceil(vocab / 32)], on the host; pinned for a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Which rows are sampled, and the drafts to verify; everything about them is host data.

    The logits of a sequence are those of its drafts, then one more. With `padded`, every sequence
    has max_drafts + 1 rows of logits, of which those after its own are ignored.
    `num_outputs` is how many tokens each request has emitted so far. Drafts form a chain, or a tree
    by their `parents`: an earlier draft of the sequence, or -1 for one that follows its last token.
    """

    rows: Sequence[int]
    num_outputs: Sequence[int]
    num_drafts: Sequence[int]
    draft_tokens: Tensor | None = None  # [num_seqs, max_drafts]
    padded: bool = False
    parents: Sequence[Sequence[int]] | None = None  # [num_seqs][num_drafts]
    masks: TokenMasks | None = None

    def __post_init__(self) -> None:
        sizes = len(self.rows), len(self.num_outputs), len(self.num_drafts)
        if len(set(sizes)) > 1:
            raise ValueError(f"rows, num_outputs and num_drafts have lengths {sizes}")
        if len(set(self.rows)) < len(self.rows):
            raise ValueError(f"rows {list(self.rows)} are not distinct")
        low, high = min(self.num_drafts, default=0), max(self.num_drafts, default=0)
        if low < 0 or high > self.max_drafts:
            raise ValueError(f"num_drafts {list(self.num_drafts)} exceed {self.max_drafts} drafts")
        if self.draft_tokens is not None and self.draft_tokens.shape[0] != len(self.rows):
            shape = [*self.draft_tokens.shape]
            raise ValueError(f"draft_tokens {shape} do not match {len(self.rows)} sequences")
        if self.parents is not None:
            self._check_parents(self.parents)

    def _check_parents(self, parents: Sequence[Sequence[int]]) -> None:
        sizes = [len(each) for each in parents]
        if sizes != list(self.num_drafts):
            raise ValueError(f"parents of {sizes} drafts do not match {list(self.num_drafts)}")
        for seq, each in enumerate(parents):
            check_tree_order(f"sequence {seq}", each)

    @property
    def max_drafts(self) -> int:
        return 0 if self.draft_tokens is None else self.draft_tokens.shape[1]

    @property
    def num_logits(self) -> int:
        """How many rows of logits the batch has."""
        if self.padded:
            return len(self.rows) * (self.max_drafts + 1)
        return sum(self.num_drafts) + len(self.rows)


@dataclass(frozen=True, slots=True)
class Positions:
    """Host arrays with an entry for each row of logits."""

    seqs: Array  # the sequence
    steps: Array  # which of the sequence's positions: 0 is that of the first drafts
    places: Array  # [num_seqs, max_drafts + 1]: the rows of a sequence, its last one repeated

    @staticmethod
    def of(batch: SampleBatch) -> Positions:
        """The positions of a batch."""
        num_seqs, width = len(batch.rows), batch.max_drafts + 1
        lengths = np.array(batch.num_drafts, np.int64) + 1
        if batch.padded:
            lengths = np.full(num_seqs, width, np.int64)
        starts = np.cumsum(lengths) - lengths
        seqs = np.repeat(np.arange(num_seqs), lengths)
        inside = np.minimum(np.arange(width), lengths[:, None] - 1)
        steps = np.arange(len(seqs)) - starts[seqs]
        if batch.parents is not None:
            steps = tree_arrays(batch.parents, width)["depths"][seqs, steps]
        return Positions(seqs, steps, starts[:, None] + inside)

    def earlier_drafts(self, batch: SampleBatch) -> tuple[Array, Array]:
        """Pairs of a row of logits and a draft before it, as an index into all draft tokens."""
        if batch.parents is not None:
            return self._ancestors(batch, batch.parents)
        known = np.minimum(self.steps, np.array(batch.num_drafts)[self.seqs])
        rows = np.repeat(np.arange(len(known)), known)
        drafts = np.arange(len(rows)) - (np.cumsum(known) - known)[rows]
        return rows, self.seqs[rows] * batch.max_drafts + drafts

    def _ancestors(
        self, batch: SampleBatch, parents: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        rows, drafts = list[int](), list[int]()
        for seq, each in enumerate(parents):
            for node in range(len(each)):
                draft = node
                while draft >= 0:
                    rows.append(int(self.places[seq, node + 1]))
                    drafts.append(seq * batch.max_drafts + draft)
                    draft = each[draft]
        return np.array(rows, np.int64), np.array(drafts, np.int64)


def tree_arrays(parents: Sequence[Sequence[int]], width: int) -> dict[str, Array]:
    """Trees as int64 [num_seqs, width]; node 0 is the last token, its own parent, at depth 0.

    Padding is like node 0.
    """
    above, depths = (np.zeros((len(parents), width), np.int64) for _ in range(2))
    for seq, each in enumerate(parents):
        above[seq, 1 : 1 + len(each)] = np.array(each, np.int64) + 1
        depths[seq, 1 : 1 + len(each)] = node_depths(each)
    return {"above": above, "depths": depths}


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The tokens emitted for each sequence, on the device.

    Positions of `tokens` from `num_emitted` on are padding. `num_accepted` counts drafts.
    """

    tokens: Tensor  # [num_seqs, max_drafts + 1], int64
    num_emitted: Tensor  # [num_seqs], int64
    num_accepted: Tensor  # [num_seqs], int64
    peaks: Tensor  # [num_seqs, max_drafts + 1, 2], of `row_peaks`
    logprobs: Logprobs | None = None  # of [num_seqs, max_drafts + 1] tokens
    path: Tensor | None = None  # of trees, [num_seqs, max_drafts + 1]: the node of each token

    @property
    def last_tokens(self) -> Tensor:
        """The last token emitted for each sequence, [num_seqs] int64."""
        if self.tokens.shape[1] == 1:
            return self.tokens.squeeze(1)
        return self.tokens.gather(1, self.num_accepted.unsqueeze(1)).squeeze(1)

    def to_host(self, saturated: Tensor | None = None) -> PendingSamples:
        """Starts the one copy to the host, which takes along a counter of the caches."""
        tensors = {"tokens": self.tokens, "num_accepted": self.num_accepted, "peaks": self.peaks}
        if self.path is not None:
            tensors["path"] = self.path
        if saturated is not None:
            tensors["saturated"] = saturated
        if self.logprobs is not None:
            tensors |= self.logprobs._asdict()
        return PendingSamples(download(tensors))


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Logprobs of one sequence, a row for each emitted token."""

    chosen: Array  # [num_emitted]
    ranks: Array  # [num_emitted]
    top_ids: Array  # [num_emitted, num_top]
    top: Array  # [num_emitted, num_top]


@dataclass(frozen=True, slots=True)
class HostSamples:
    """The emitted tokens, a list for each sequence, without padding."""

    tokens: list[list[int]]  # none where no token could be chosen
    num_accepted: list[int]
    accepted: list[list[int]]  # which drafts, in the order of the tokens
    logprobs: list[HostLogprobs] | None = None
    saturated: int = 0  # the counter that came along, of 32 bits
    num_nan_rows: int = 0  # emitted tokens that had a NaN among their logits


class PendingSamples:
    """Samples on their way to the host."""

    def __init__(self, copy: Download) -> None:
        self._download = copy

    def wait(self) -> HostSamples:
        """Waits for the copy alone, not for work that was launched after it."""
        return self._samples

    @cached_property
    def _samples(self) -> HostSamples:
        arrays = self._download.wait()
        num_accepted: list[int] = arrays.pop("num_accepted").tolist()
        rows: list[list[int]] = arrays.pop("tokens").tolist()
        tokens = [row[: accepted + 1] for row, accepted in zip(rows, num_accepted, strict=True)]
        saturated = int(arrays.pop("saturated")[0]) if "saturated" in arrays else 0
        accepted = [list(range(count)) for count in num_accepted]
        if "path" in arrays:
            paths: list[list[int]] = (arrays.pop("path") - 1).tolist()
            accepted = [path[1 : 1 + n] for path, n in zip(paths, num_accepted, strict=True)]
        peaks = arrays.pop("peaks")
        if np.isneginf(peaks[:, :, 0]).any():
            for seq, count in enumerate(num_accepted):
                if -np.inf in peaks[seq, : count + 1, 0]:
                    tokens[seq] = []
        nan = np.isnan(peaks[:, :, 1])
        num_nan = 0
        if nan.any():
            num_nan = sum(int(nan[i, : n + 1].sum()) for i, n in enumerate(num_accepted))
        logprobs = None
        if arrays:
            logprobs = [
                HostLogprobs(**{name: array[seq, : count + 1] for name, array in arrays.items()})
                for seq, count in enumerate(num_accepted)
            ]
        return HostSamples(tokens, num_accepted, accepted, logprobs, saturated, num_nan)
