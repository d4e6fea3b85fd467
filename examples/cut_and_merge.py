"""Cut attention into parts, merge them in several orders, and see that nothing is lost.

Errors are the largest of any output or LSE against the uncut attention in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F

import anabranch as ab
from anabranch import reference

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_KEYS = 8, 32, 8, 128, 4096
Merge = Callable[[list[ab.AttentionState], torch.dtype], ab.AttentionState]


def cut(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every key in one part, the parts at odd places."""
    rest = keys[2001:]
    return {
        "keys 0 to 612": keys[:613],
        "keys 613 to 2000": keys[613:2001],
        "every third of the rest": rest[::3],
        "the others of the rest": rest[torch.arange(len(rest)) % 3 != 0],
        "no keys at all": keys[:0],
    }


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ab.AttentionState:
    """Attention over these keys; the output stays in float32, as a part's should."""
    q, k, v = q.float(), k.float(), v.float()
    grouped = q.view(NUM_TOKENS, NUM_KV_HEADS, -1, HEAD_DIM)
    scores = torch.einsum("qhgd,khd->qhgk", grouped, k) * HEAD_DIM**-0.5
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    out = torch.einsum("qhgk,khd->qhgd", weights, v)
    return ab.AttentionState(out.flatten(1, 2), lse.flatten(1, 2))


def attend_uncut(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """torch's own attention; to it the sink is one more key, of zeros, with a bias."""
    k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    bias = torch.zeros(NUM_HEADS, NUM_TOKENS, NUM_KEYS + 1, dtype=q.dtype)
    bias[..., -1] = sinks[:, None]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], enable_gqa=True)
    return out[0].transpose(0, 1)


def merge_in_turn(parts: list[ab.AttentionState], dtype: torch.dtype) -> ab.AttentionState:
    """((a + b) + c) + d, the last merge into the output's precision."""
    return ab.merge(reduce(ab.merge, parts[:-1]), parts[-1], out_dtype=dtype)


def merge_as_tree(parts: list[ab.AttentionState], dtype: torch.dtype) -> ab.AttentionState:
    """(a + b) + (c + d)."""
    while len(parts) > 2:
        parts = [ab.merge(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return ab.merge(*parts, out_dtype=dtype)


def merge_stacked(parts: list[ab.AttentionState], dtype: torch.dtype) -> ab.AttentionState:
    """One tensor whose first dimension holds the parts, as split-KV kernels leave them."""
    stacked = ab.AttentionState(
        torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts])
    )
    return ab.merge(stacked, dim=0, out_dtype=dtype)


ORDERS: dict[str, Merge] = {
    "all at once": lambda parts, dtype: ab.merge(*parts, out_dtype=dtype),
    "one after the other": merge_in_turn,
    "backwards": lambda parts, dtype: merge_in_turn(parts[::-1], dtype),
    "as a tree": merge_as_tree,
    "stacked": merge_stacked,
}


def largest_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of any element."""
    return float((actual.double() - exact).abs().max())


def compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> None:
    """Print the error of torch over all keys, then that of the parts merged in every order."""
    precision = str(q.dtype).removeprefix("torch.")
    exact = reference.attention(q, k, v, sinks=sinks)
    by_torch = largest_error(attend_uncut(q, k, v, sinks), exact.out)
    print(f"{precision:<10} {'torch, uncut':<20} {by_torch:>9.1e}")
    parts = [attend(q, k[keys], v[keys]) for keys in cut(torch.arange(NUM_KEYS)).values()]
    parts.append(ab.AttentionState.sink(sinks, parts[0]))
    for order, merge in ORDERS.items():
        merged = merge(parts, q.dtype)
        error = largest_error(merged.out, exact.out)
        error_of_lse = largest_error(merged.lse, exact.lse)
        print(f"{precision:<10} {order:<20} {error:>9.1e} {error_of_lse:>9.1e}")
        if error > 2 * by_torch:
            raise SystemExit(f"{order}: more was lost than by torch's own attention")


def main() -> None:
    """Print the parts, then one line for each precision and order."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_DIM, generator=rng)
    k, v = (torch.randn(NUM_KEYS, NUM_KV_HEADS, HEAD_DIM, generator=rng) for _ in range(2))
    sinks = (torch.randn(NUM_HEADS, generator=rng) + 4).bfloat16().float()
    print(f"{NUM_TOKENS} tokens, {NUM_HEADS} heads on {NUM_KV_HEADS}, {NUM_KEYS} keys and a sink:")
    for name, keys in cut(torch.arange(NUM_KEYS)).items():
        print(f"  {len(keys):>5}  {name}")
    print(f"\n{'precision':<10} {'parts merged':<20} {'error':>9} {'of lse':>9}")
    for dtype in (torch.float32, torch.bfloat16):
        compare(q.to(dtype), k.to(dtype), v.to(dtype), sinks)
    print("\nNothing was lost: merged in any order, the parts err at most twice as much as torch.")


if __name__ == "__main__":
    main()
