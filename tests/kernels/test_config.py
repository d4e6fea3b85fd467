"""Configurations fit the GPU they run on, and pad head dims as little as they can."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from configurations import every_attend_config

from anabranch.kernels.config import fit_shared_memory, select_attend, shared_bytes, split_head_dim
from anabranch.launches import triton_version as versions

HOPPER = {"per_program": 232448, "per_sm": 233472}
SMALLER = {
    "A100": {"per_program": 166912, "per_sm": 167936},
    "4090": {"per_program": 101376, "per_sm": 102400},
    "MI300": {"per_program": 65536, "per_sm": 65536},
}


def test_hopper_runs_what_was_tuned_there() -> None:
    for config, (_, _, dims, itemsize) in every_attend_config().items():
        assert fit_shared_memory(config, *dims, itemsize, **HOPPER) == config


@pytest.mark.parametrize(
    ("rows", "code_rows", "workers"), [(4, 8, 4), (4, 16, 3), (9, 8, 3), (32, 8, 2), (512, 8, 2)]
)
def test_hopper_has_room_for_quantised_keys(rows: int, code_rows: int, workers: int) -> None:
    """Codes under way are bytes, so that three programs fit where two of bfloat16 would."""
    dims = {"head_dim_k": 128, "head_dim_v": 128, "itemsize": 2, "code_rows": code_rows}
    config = select_attend(rows_per_seq=rows, num_pairs=512, **dims, quantised=True)
    assert config.workers_per_sm == workers
    assert fit_shared_memory(config, 128, 128, 2, **HOPPER, code_words=True) == config
    fewer = fit_shared_memory(config, 128, 128, 2, **SMALLER["4090"], code_words=True)
    assert (fewer.workers_per_sm, fewer.max_registers) == (1, None)


@pytest.mark.parametrize(
    ("rows", "pairs", "is_int8", "sides", "workers"),
    [
        (8, 512, False, (8, 128), 2),
        (8, 512, True, (8, 64), 4),
        (8, 64, True, (8, 128), 2),
        (9, 512, False, (16, 64), 3),
    ],
)
def test_few_rows_by_pairs_of_keys(
    rows: int, pairs: int, is_int8: bool, sides: tuple[int, int], workers: int
) -> None:
    """No tile is converted in shared memory, so that four programs fit, or tiles of 128 keys."""
    dims = {"head_dim_k": 128, "head_dim_v": 128, "itemsize": 2}
    codes = {"code_words": True, "code_pairs": True}
    config = select_attend(
        rows_per_seq=rows, num_pairs=pairs, **dims, quantised=True, code_pairs=True,
        int8_codes=is_int8,
    )  # fmt: skip
    assert ((config.block_m, config.block_n), config.workers_per_sm) == (sides, workers)
    assert fit_shared_memory(config, 128, 128, 2, **HOPPER, **codes) == config


@pytest.mark.parametrize("rows", [16, 32, 128])
@pytest.mark.parametrize("pairs", [1, 64])
def test_hopper_has_room_for_latent_keys(rows: int, pairs: int) -> None:
    dims = {"head_dim_k": 576, "head_dim_v": 512, "itemsize": 2}
    config = select_attend(rows_per_seq=rows, num_pairs=pairs, **dims, latent=True)
    assert fit_shared_memory(config, 576, 0, 2, **HOPPER) == config


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


def test_the_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """By metadata, or by the module that another distribution brings, or none."""

    def lacks(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", lambda name: {"triton": "3.9.1+rocm7"}[name])
    assert versions.installed() == (3, 9)
    monkeypatch.setattr(versions, "version", lacks)
    module = SimpleNamespace(__version__="3.8.0")
    monkeypatch.setattr(versions, "import_module", lambda name: {"triton": module}[name])
    monkeypatch.setattr(versions, "find_spec", lambda name: {"triton": module}[name])
    assert versions.installed() == (3, 8)
    monkeypatch.setattr(versions, "find_spec", lambda _: None)
    assert versions.installed() == versions.OLDEST
