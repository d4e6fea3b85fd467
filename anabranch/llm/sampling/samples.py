"""The results of sampling, on the device and, after a copy, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anabranch.llm.sampling.logprobs import Logprobs
from anabranch.llm.sampling.transfer import Array, Download, download


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


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Samples on their way to the host."""

    _download: Download

    def wait(self) -> HostSamples:
        """Waits for the copy alone, not for work that was launched after it."""
        arrays = self._download.wait()
        num_accepted: list[int] = arrays.pop("num_accepted").tolist()
        rows: list[list[int]] = arrays.pop("tokens").tolist()
        tokens = [row[: accepted + 1] for row, accepted in zip(rows, num_accepted, strict=True)]
        saturated = int(arrays.pop("saturated")[0]) if "saturated" in arrays else 0
        accepted = [list(range(count)) for count in num_accepted]
        if "path" in arrays:
            paths: list[list[int]] = (arrays.pop("path") - 1).tolist()
            accepted = [
                path[1 : 1 + count] for path, count in zip(paths, num_accepted, strict=True)
            ]
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
