"""What a chain of drafting passes reads, in persistent device memory.

For each sequence the host sends the last tokens, the length, the pages and the number of drafts.
Positions, slots and lengths of every pass follow from that on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

import torch

from anabranch.compositions.tree import make_draft_tree
from anabranch.llm.runner.step import Entry, Step
from anabranch.llm.runner.step_inputs import FixedArrays, aligned, fill_pages
from anabranch.llm.sequences.sequence import Scheduled

CATCH_UP = 2  # tokens the draft model has not computed after all drafts were accepted


class Pass(NamedTuple):
    """One run of the draft model, but for the tokens."""

    positions: torch.Tensor  # int64 [num_tokens]
    step: Step
    rows: torch.Tensor | int  # whose logits are wanted; 0 for all


class DraftInputs:
    """Buffers for chains of up to some number of sequences and drafts."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_pages: int,
        max_drafts: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_pages = max_num_pages
        self._page_size = page_size
        size = aligned(max_num_seqs)
        whole = torch.int64
        self._arrays = FixedArrays(
            {
                "ids": (whole, (size, CATCH_UP)),
                "lengths": (whole, (size,)),  # of what is known
                "num_drafts": (whole, (size,)),
                "rows": (whole, (size,)),  # of the table of unseen tokens
                "pages": (torch.int32, (size, aligned(max_num_pages))),
            },
            device,
        )
        places = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._starts = {q_len: places * q_len for q_len in (1, CATCH_UP)}
        self._last_rows = places[1:].long() * CATCH_UP - 1
        self._offsets = torch.arange(-CATCH_UP, max_drafts - 1, device=device)[:, None]

    def load(self, runs: Seq[Scheduled], batch: int) -> None:
        """Copy what the host knows of the runs, followed by inert sequences up to `batch`."""
        arrays = self._arrays.write()
        size, stop = len(runs), aligned(batch)
        for name in ("ids", "lengths", "num_drafts"):
            arrays[name][size:stop] = 0
        ends = [run.start + run.num_known for run in runs]
        if runs:
            tokens = [
                run.seq.tokens[end - CATCH_UP : end] for run, end in zip(runs, ends, strict=True)
            ]
            arrays["ids"][:size] = tokens
        arrays["lengths"][:size] = ends
        arrays["num_drafts"][:size] = [run.num_drafts for run in runs]
        rows = [run.seq.row or 0 for run in runs]
        taken = set(rows)
        spare = (row for row in range(self._max_num_seqs) if row not in taken)
        arrays["rows"][:batch] = [*rows, *islice(spare, batch - size)]
        fill_pages(arrays["pages"], [run.seq.pages.pages for run in runs])
        self._arrays.send(size)

    def ids(self, batch: int) -> torch.Tensor:
        """The last known tokens of every sequence, packed."""
        return self._arrays.tensors["ids"][:batch].view(-1)

    def rows(self, batch: int) -> torch.Tensor:
        """Where the drafts go; inert sequences get unused rows, each once."""
        return self._arrays.tensors["rows"][:batch]

    def passes(self, batch: int, num_drafts: int) -> list[Pass]:
        """A pass for each draft; sequences that have enough drafts are inert in later ones."""
        at = self._arrays.tensors
        width = aligned(batch)
        lengths, wanted = at["lengths"][:width], at["num_drafts"][:width]
        offsets = self._offsets[: CATCH_UP + num_drafts - 1]
        runs = (offsets + 1 < wanted) & (lengths > 0)  # [num_passes + CATCH_UP - 1, width]
        positions = torch.where(runs, lengths + offsets, 0)
        pages = at["pages"][:width].gather(1, (positions // self._page_size).t())
        slots = pages.t().contiguous() * self._page_size + positions % self._page_size
        slots = torch.where(runs, slots, -1)
        ends = torch.where(runs, positions + 1, 0).int()
        first = [part[:CATCH_UP, :batch].t().flatten().contiguous() for part in (positions, slots)]
        step = self._step(batch, CATCH_UP, ends[CATCH_UP - 1], first[1])
        passes = [Pass(first[0], step, self._last_rows[:batch])]
        for place in range(CATCH_UP, len(offsets)):
            step = self._step(batch, 1, ends[place], slots[place, :batch])
            passes.append(Pass(positions[place, :batch], step, 0))
        return passes

    def tree_pass(self, batch: int, parents: torch.Tensor) -> Pass:
        """All nodes of a tree of one shape for every sequence; `parents` is int32 [num_nodes].

        Nodes from a sequence's number of drafts on are not kept.
        """
        at, num_nodes = self._arrays.tensors, len(parents)
        lengths = at["lengths"][:batch, None]
        nodes = torch.arange(num_nodes, device=parents.device)
        is_kept = (nodes < at["num_drafts"][:batch, None]) & (lengths > 0)
        places = torch.where(is_kept, lengths + nodes, 0)
        pages = at["pages"][:batch].gather(1, places // self._page_size)
        slots = torch.where(is_kept, pages * self._page_size + places % self._page_size, -1)
        ends = torch.where(lengths > 0, lengths + num_nodes, 0).flatten().int()
        starts = torch.arange(batch + 1, dtype=torch.int32, device=parents.device) * num_nodes
        tree = make_draft_tree(parents.repeat(batch), cu_seqlens_q=starts, seq_lens=ends)
        entry = Entry(
            slice(0, batch * num_nodes),
            starts,
            ends,
            at["pages"][:batch, : self._num_pages],
            tree_mask=tree.tree_mask,
        )
        positions = tree.positions.clamp(min=0).long()  # inert sequences have no context
        return Pass(positions, Step([entry], slots.flatten()), 0)

    def _step(self, batch: int, q_len: int, ends: torch.Tensor, slots: torch.Tensor) -> Step:
        pages = self._arrays.tensors["pages"][:batch, : self._num_pages]
        starts = self._starts[q_len][: batch + 1]
        return Step([Entry(slice(0, batch * q_len), starts, ends[:batch], pages)], slots)
