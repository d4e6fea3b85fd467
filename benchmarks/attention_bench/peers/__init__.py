"""Other libraries, each an optional import: a missing one is reported, never required.

ANABRANCH_PEERS may name a folder with their packages and libraries, beside what is installed.
"""

from __future__ import annotations

from functools import partial

from attention_bench.implementations import Implementation
from attention_bench.peers import flash_attention3, flashinfer_attention, torch_attention


def implementations(bench: str, device: str) -> list[Implementation]:
    """The peers of a benchmark."""
    if device == "cpu":
        attend = Implementation("SDPA contiguous", "peer", torch_attention.attend)
        return [] if bench == "merge" else [attend]
    if bench == "merge":
        return [Implementation("FlashInfer", "peer", flashinfer_attention.merge)]
    cudnn, flash2 = (
        partial(torch_attention.attend_forced, f"{name}_ATTENTION") for name in ("CUDNN", "FLASH")
    )
    if bench == "prefill":
        return [
            Implementation("FA3", "peer", flash_attention3.attend_ragged),
            Implementation("FA3 paged", "peer", flash_attention3.attend_paged),
            Implementation("cuDNN", "peer", cudnn),
            Implementation("FA2", "peer", flash2),
            Implementation("flex", "peer", torch_attention.attend_flex),
        ]
    return [
        Implementation("FA3", "peer", flash_attention3.attend_paged),
        Implementation("FlashInfer", "peer", flashinfer_attention.attend),
        Implementation("cuDNN contiguous", "context", cudnn),
    ]
