"""The kernels of merge.cu by name, and how a merge is cut into blocks of threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SOURCES = 8
DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
VARIANTS = ("pair1_vector", "pair2_vector", "pair1_scalar", "parts_vector", "parts_scalar")
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

    small_block: int  # threads of a block that merges two states, one row to a thread
    large_block: int  # the same with two rows to a thread,
    large_threads: int  # from a merge of this many threads on
    parts_block: int  # threads of a block that merges any number of parts;
    parts_threads: int  # below this many threads, groups of the block share the parts
    programmatic: bool  # start while the kernel ahead ends


def select_layout(capability: tuple[int, int], num_sms: int) -> Layout:
    """The layout for a GPU of this compute capability and number of multiprocessors."""
    resident = 2048 * num_sms
    return Layout(
        small_block=128,
        large_block=256,
        large_threads=4 * resident,
        parts_block=256,
        parts_threads=resident,
        programmatic=capability >= (9, 0),
    )
