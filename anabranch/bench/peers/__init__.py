"""Other libraries, each behind an optional import: what is not here is reported, never required.

ANABRANCH_PEERS may name a folder with their packages and libraries, beside what is installed.
"""

from __future__ import annotations

from functools import partial

from anabranch.bench.implementations import Implementation
from anabranch.bench.peers import flash_attention3, flashinfer, flex, sdpa


def implementations(bench: str, device: str) -> list[Implementation]:
    """The peers of a benchmark."""
    if bench == "merge":
        return [Implementation("FlashInfer", "peer", flashinfer.merge)] if device == "cuda" else []
    if device == "cpu":
        return [Implementation("SDPA contiguous", "peer", sdpa.attend)]
    if bench == "prefill":
        return [
            Implementation("FA3", "peer", flash_attention3.attend_ragged),
            Implementation("FA3 paged", "peer", flash_attention3.attend_paged),
            Implementation("cuDNN", "peer", partial(sdpa.attend_forced, "CUDNN_ATTENTION")),
            Implementation("FA2", "peer", partial(sdpa.attend_forced, "FLASH_ATTENTION")),
            Implementation("flex", "peer", flex.attend),
        ]
    return [
        Implementation("FA3", "peer", flash_attention3.attend_paged),
        Implementation("FlashInfer", "peer", flashinfer.attend),
        Implementation(
            "cuDNN contiguous", "context", partial(sdpa.attend_forced, "CUDNN_ATTENTION")
        ),
    ]
