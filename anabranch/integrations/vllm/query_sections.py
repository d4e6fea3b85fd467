"""Where a batch of vLLM's is cut into sections: decodes, prompts with a past, prompts without."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.compositions.sections import Section

ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that have less


class Bounds(NamedTuple):
    """Consecutive sequences of a batch and their tokens; known to the host."""

    seqs: slice
    tokens: slice
    are_new: bool  # no sequence has keys from an earlier step


def find_bounds(
    query_starts: torch.Tensor,  # [num_seqs + 1], on the host
    most_keys: torch.Tensor | None,  # [num_seqs], on the host: exact where a prompt is computed
    num_tokens: int,
    *,
    decode_tokens: int,  # the longest query of a decode or a verification
) -> list[Bounds]:
    """Decodes, prompts with a past, prompts without one, in the order vLLM sorts them."""
    num_seqs = len(query_starts) - 1
    lengths = query_starts.diff()
    is_prompt = lengths > decode_tokens
    first_prompt = int(is_prompt.int().argmax()) if bool(is_prompt.any()) else num_seqs
    first_new = num_seqs
    if most_keys is not None and first_prompt < num_seqs:
        # Not all that differs has a past: a draft model's queries are longer than vLLM counts keys.
        has_past = (most_keys[:num_seqs] != lengths)[first_prompt:]
        first_new = first_prompt + int(has_past.int().cumsum(0).argmax()) + 1
        first_new = first_new if bool(has_past.any()) else first_prompt
    edges = sorted({0, first_prompt, first_new, num_seqs})
    starts = [int(query_starts[edge]) for edge in edges[:-1]] + [num_tokens]
    return [
        Bounds(slice(seq, stop), slice(token, end), seq >= first_new)
        for seq, stop, token, end in zip(edges, edges[1:], starts, starts[1:], strict=False)
    ]


def cut_section(
    bounds: Bounds,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    causal: bool,
) -> Section:
    """One section's tensors; views of the batch's own where it begins with the batch."""
    first, stop = bounds.seqs.start, bounds.seqs.stop
    starts = query_start_loc[first : stop + 1]
    lengths, table = seq_lens[first:stop], block_table[first:stop]
    if first:
        starts, lengths = starts - starts[0], lengths.clone()
    if first * table.stride(0) * table.element_size() % ALIGNMENT:
        table = table.clone()
    return Section(bounds.tokens, starts, lengths, table, bounds.are_new, causal)
