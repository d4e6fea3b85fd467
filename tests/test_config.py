"""Configurations fit the GPU they run on, and pad head dims as little as they can."""

from __future__ import annotations

import pytest
from configurations import every_attend_config

from anabranch.kernels.config import fit_shared_memory, shared_bytes, split_head_dim

HOPPER = {"per_program": 232448, "per_sm": 233472}
SMALLER = {
    "A100": {"per_program": 166912, "per_sm": 167936},
    "4090": {"per_program": 101376, "per_sm": 102400},
    "MI300": {"per_program": 65536, "per_sm": 65536},
}


def test_hopper_runs_what_was_tuned_there() -> None:
    for config, (_, _, dims, itemsize) in every_attend_config().items():
        assert fit_shared_memory(config, *dims, itemsize, **HOPPER) == config


@pytest.mark.parametrize("limits", SMALLER.values(), ids=SMALLER)
def test_smaller_gpus_get_smaller_tiles(limits: dict[str, int]) -> None:
    for config, (_, _, dims, itemsize) in every_attend_config().items():
        fitted = fit_shared_memory(config, *dims, itemsize, **limits)
        used = shared_bytes(fitted, *dims, itemsize)
        smallest = fitted.num_stages == 2 and fitted.block_n == 16
        assert used <= limits["per_program"] or smallest
        assert fitted.workers_per_sm == 1 or used * fitted.workers_per_sm <= limits["per_sm"]
        assert fitted.block_m == config.block_m


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(1, (16, 0)), (40, (32, 16)), (64, (64, 0)), (72, (64, 16)), (96, (64, 32)),
     (128, (128, 0)), (192, (128, 64)), (200, (128, 128)), (256, (256, 0))],
)  # fmt: skip
def test_head_dims_are_held_by_two_powers_of_two(head_dim: int, parts: tuple[int, int]) -> None:
    main, rest = split_head_dim(head_dim)
    assert main + rest >= head_dim
    assert (main, rest) == parts or (head_dim, main, rest) == (200, 256, 0)
