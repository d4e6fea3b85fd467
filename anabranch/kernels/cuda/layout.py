"""The kernels of merge.cu by name, and how a merge is cut into blocks of threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
VARIANTS = (
    "pair1_vector",
    "pair2_vector",
    "pair1_scalar",
    "flat_vector",
    "parts_vector",
    "parts_scalar",
)
# In the order in which launcher.c numbers them.
KERNELS = tuple(
    f"{variant}_{source}_{merged}"
    for variant in VARIANTS
    for source in DTYPES.values()
    for merged in DTYPES.values()
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How merges are cut into blocks; a merge has one thread for each 16 bytes of a source."""

    one_row_block: int  # threads of a block that merges two states, one row to a thread
    two_rows_block: int  # the same with two rows to a thread,
    two_rows_threads: int  # from a merge of this many threads on,
    large_block: int  # and in the largest,
    large_threads: int  # which begin here
    flat_block: int  # threads of a block that merges two states with equally spaced rows,
    flat_threads: int  # in merges of fewer threads than these
    parts_block: int  # threads of a block that merges any number of parts;
    parts_threads: int  # below this many threads, groups of the block share the parts
    programmatic: bool  # start while the kernel ahead ends


def select_layout(capability: tuple[int, int], num_sms: int) -> Layout:
    """The layout for a GPU of this compute capability and number of multiprocessors."""
    # Microseconds in a CUDA graph on an H200 (benchmarks/results/launch_cost/h200.json), float16,
    # head dim 128, FlashInfer in brackets: 256 x 16 one row of 128 2.17 (2.26); two rows of 256:
    # 613 x 48 7.02 (6.92), 4096 x 32 25.06 (25.10), 16384 x 32 94.64 and of 512 94.25 (94.57).
    # Not overlapping the launch ahead costs 0.3 to 0.7 more, streaming past the caches up to 14%.
    # Flat rows, another run: 1024 x 32 x 128 in the cache 3.80, two rows 4.67 (3.97), 512 x 64 x 64
    # 2.40 and 2.81 (2.45), 333 x 40 x 128 2.33 and 2.68 (2.14); not in the cache 613 x 48 6.90 and
    # 7.02 (6.88), 4096 x 32 25.23 and 25.14 (25.16). Two vectors of a row to a thread: 4.13, 3.06,
    # 2.56.
    resident = 2048 * num_sms
    return Layout(
        one_row_block=128,
        two_rows_block=256,
        two_rows_threads=resident,
        large_block=512,
        large_threads=16 * resident,
        flat_block=256,
        flat_threads=4 * resident,
        parts_block=256,
        parts_threads=resident,
        programmatic=capability >= (9, 0),
    )
