"""Host microseconds of a call, launched back to back without waiting, beside FlashAttention-3's.

    ANABRANCH_PEERS=FOLDER python benchmarks/host_cost.py --out host_cost.json

Small models, eager frameworks and prompts outside CUDA graphs live on this. The best of several
rounds counts: the queue of the GPU must never be full.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_bench.implementations import UnavailableError
from attention_bench.peers.flash_attention3 import LIBRARY
from attention_bench.peers.site import find_library
from rows import header, print_rows, save_rows

import anabranch as ab

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
CASES = {
    "decode 1 x 1024": ([1024], [1]),
    "decode 64 x 1024": ([1024] * 64, [1] * 64),
    "prompt 1 x 256": ([256], [256]),
    "prompt 1 x 1024": ([1024], [1024]),
    "verify 8 x 5": ([1024] * 8, [5] * 8),
}
UNSET = ("is_causal", "window_size_left", "window_size_right", "softcap", "num_splits")


def host_us(call: Callable[[], object], calls: int = 40, rounds: int = 7) -> float:
    for _ in range(5):
        call()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return round(best, 1)


def flash_attention(
    q: torch.Tensor, keys: ab.PagedKV, starts: torch.Tensor, lens: list[int], q_lens: list[int]
) -> Callable[[], object]:
    """The operator of FlashAttention-3 as vLLM builds it."""
    torch.ops.load_library(str(find_library(LIBRARY)))
    operator = torch.ops._vllm_fa3_C.fwd
    given: dict[str, Any] = {each.name: None for each in operator.default._schema.arguments}
    given |= dict(zip(UNSET, (True, -1, -1, 0.0, 0), strict=True))
    given |= {"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
    given |= {"q": q, "k": keys.k, "v": keys.v, "cu_seqlens_q": starts, "seqused_k": keys.seq_lens}
    given |= {"page_table": keys.page_table, "softmax_scale": DIM**-0.5}
    given |= {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(lens)}
    return lambda: operator(**given)


def measure(name: str, lens: list[int], q_lens: list[int]) -> dict[str, object]:
    """All calls of one step."""
    ints: Callable[[Sequence[int]], torch.Tensor] = lambda x: torch.tensor(  # noqa: E731
        x, dtype=torch.int32, device="cuda"
    )
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    num_pages = sum(-(-length // PAGE) for length in lens)
    k, v = draw(num_pages, PAGE, KV_HEADS, DIM), draw(num_pages, PAGE, KV_HEADS, DIM)
    table = ints(range(num_pages)).view(len(lens), -1)
    q, seq_lens = draw(sum(q_lens), HEADS, DIM), ints(lens)
    starts = ints([0, *torch.tensor(q_lens).cumsum(0).tolist()])
    keys = ab.PagedKV(k, v, table, seq_lens)
    new_k, new_v, slots = q[:, :KV_HEADS], q[:, KV_HEADS : 2 * KV_HEADS], ints(range(sum(q_lens)))
    plan = ab.make_plan(q, keys, cu_seqlens_q=starts)
    state = ab.attend(q, keys, cu_seqlens_q=starts, plan=plan)

    def attend(**given: Any) -> object:
        return ab.attend(q, keys, cu_seqlens_q=starts, **given)

    def attend_new() -> object:
        return ab.attend(q, ab.PagedKV(k, v, table, seq_lens), cu_seqlens_q=starts, plan=plan)

    row: dict[str, object] = {
        "case": name,
        "impl": plan.impl,
        "planned": host_us(lambda: attend(plan=plan)),
        "planned, new PagedKV": host_us(attend_new),
        "planned, out": host_us(lambda: attend(plan=plan, out=state)),
        "unplanned": host_us(attend),
        "PagedKV": host_us(lambda: ab.PagedKV(k, v, table, seq_lens)),
        "make_plan": host_us(lambda: ab.make_plan(q, keys, cu_seqlens_q=starts)),
        "append_kv": host_us(lambda: ab.append_kv(keys, new_k, new_v, slots)),
        "merge": host_us(lambda: ab.merge(state, state)),
    }
    try:
        row["FlashAttention-3"] = host_us(flash_attention(q, keys, starts, lens, q_lens))
    except UnavailableError as reason:
        row["FlashAttention-3"] = str(reason)
    return row


def rows() -> Iterator[dict[str, object]]:
    with torch.inference_mode():
        for name, (lens, q_lens) in CASES.items():
            yield measure(name, lens, q_lens)


def main() -> None:
    """Measure, print, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = header("host time of one call, the best round of seven")
    about["timing"] = "host clock, calls back to back, the best round of seven, us a call, bfloat16"
    save_rows(options.out, about, print_rows(rows()))


if __name__ == "__main__":
    main()
