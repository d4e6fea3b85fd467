"""Every configuration of tiles that attend() can select."""

from __future__ import annotations

from itertools import product

from anabranch.kernels.config import AttendConfig, select_attend


def every_attend_config() -> dict[AttendConfig, tuple[float, int, tuple[int, int], int]]:
    """Each configuration, and the widest call that selects it: rows, pairs, head dims, itemsize."""
    calls = product(
        (4.0, 8.0, 16.0, 32.0, 64.0, 1024.0, 32768.0),
        (8, 64, 1024),
        ((64, 64), (128, 128), (192, 128), (256, 256)),
        (2, 4),
    )
    configs: dict[AttendConfig, tuple[float, int, tuple[int, int], int]] = {}
    for rows, pairs, dims, itemsize in calls:
        config = select_attend(
            rows_per_seq=rows,
            num_pairs=pairs,
            head_dim_k=dims[0],
            head_dim_v=dims[1],
            itemsize=itemsize,
        )
        configs[config] = (rows, pairs, dims, itemsize)
    return configs
