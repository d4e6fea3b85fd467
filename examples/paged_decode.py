"""Decode over a paged cache: write new tokens, attend, and share a prefix by a merge.

Four sequences begin with the same pages. Attending to those once for all queries, to each
sequence's own pages apart, and merging the two states is what attending to everything gives.
"""

from __future__ import annotations

import torch

import anabranch as ab

NUM_SEQS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 8, 2, 64, 16
PREFIX_PAGES, OWN_PAGES = 6, 2
NUM_PAGES = PREFIX_PAGES + NUM_SEQS * OWN_PAGES
OWN_LENS = (3, 16, 21, 30)  # keys of each sequence after the prefix, before the step


def integers(*values: int) -> torch.Tensor:
    """Lengths and tables are int32."""
    return torch.tensor(values, dtype=torch.int32)


def main() -> None:
    """One decode step, with and without the cascade."""
    rng = torch.Generator().manual_seed(0)
    shape = (2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = torch.randn(shape, generator=rng)
    new_k, new_v = torch.randn(2, NUM_SEQS, NUM_KV_HEADS, HEAD_DIM, generator=rng)
    q = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_DIM, generator=rng)
    prefix_table = torch.arange(PREFIX_PAGES, dtype=torch.int32)[None]
    own_table = torch.arange(PREFIX_PAGES, NUM_PAGES, dtype=torch.int32).view(NUM_SEQS, OWN_PAGES)
    table = torch.cat([prefix_table.expand(NUM_SEQS, -1), own_table], dim=1)
    own_lens = integers(*OWN_LENS) + 1  # the new token counts: it attends to itself
    prefix_len = PREFIX_PAGES * PAGE_SIZE

    keys = ab.PagedKV(k_cache, v_cache, table, own_lens + prefix_len)
    last = own_lens.long() - 1
    slots = own_table[torch.arange(NUM_SEQS), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    ab.append_kv(keys, new_k, new_v, slots)
    whole = ab.attend(q, keys)
    lens = [prefix_len + length + 1 for length in OWN_LENS]
    print(f"{NUM_SEQS} sequences of {lens} keys: out {tuple(whole.out.shape)}")

    # All queries belong to one sequence, the prefix, and every one of them sees all of it.
    prefix = ab.PagedKV(k_cache, v_cache, prefix_table, integers(prefix_len))
    shared = ab.attend(q, prefix, cu_seqlens_q=integers(0, NUM_SEQS), causal=False)
    own = ab.attend(q, ab.PagedKV(k_cache, v_cache, own_table, own_lens))
    merged = ab.merge(shared, own)
    error = max(float((a - b).abs().max()) for a, b in zip(merged, whole, strict=True))
    print(f"prefix of {prefix_len} keys read once, merged: largest difference {error:.1e}")
    torch.testing.assert_close(tuple(merged), tuple(whole))


if __name__ == "__main__":
    main()
