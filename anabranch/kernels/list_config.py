"""Tiles of lists of keys that are cut into parts of a program each."""

from __future__ import annotations

from functools import partial

from anabranch.kernels.config import WIDE, AttendConfig, fit_shared_memory, power_of_two

LIST_PROGRAMS = 3  # for parts of lists, that a processor is given at most


def select_lists(
    *,
    group: int,
    num_lists: int,
    width: int,
    head_dim_k: int,
    head_dim_v: int,
    itemsize: int,
    num_sms: int,
    per_program: int,
    per_sm: int,
) -> AttendConfig | None:
    """Tiles of lists that are cut into parts of a program each; None if these do not all fit.

    A program waits for its places in a list, then for all that lies there at once; one that has to
    wait for another to end would do that again. A trial run on an H200, graph replays, 1 x 640 of
    32000 keys: lists of query heads 8.41 (in the general kernel 13.33, in tiles of 32 keys 10.12,
    of 64 keys with a tile a part 8.87), lists of kv heads 5.36 (8.44, 7.38 and 5.87).
    """
    head_dim = max(head_dim_k, head_dim_v)
    if group > 16 or head_dim > WIDE or not num_lists * width:
        return None
    rows = power_of_two(min(group, 4))
    config = partial(AttendConfig, 16, keys_first=itemsize == 2, merge_rows=rows)
    wide = head_dim > 128  # tiles of as many bytes; not measured
    if itemsize == 4:  # transposed tiles would spill
        tried = (config(32, 4, 2, LIST_PROGRAMS, part_tiles=1),)
    elif group == 1:
        tried = (config(32 if wide else 64, 4, 3, LIST_PROGRAMS, part_tiles=2),)
    else:
        sizes = (64, 32) if wide else (128, 64)  # smaller ones leave room for more programs
        tried = (config(size, 4, 2, LIST_PROGRAMS, part_tiles=1) for size in sizes)
    for each in tried:
        fitted = fit_shared_memory(
            each, head_dim_k, head_dim_v, itemsize, per_program=per_program, per_sm=per_sm
        )
        programs = num_lists * -(-width // (fitted.block_n * fitted.part_tiles))
        if programs <= fitted.workers_per_sm * num_sms:
            return fitted
    return None
