"""What the machine can do at best, measured in the same run: reading and multiplying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from anabranch.device import num_sms
from attention_bench.implementations import Call
from attention_bench.timing import event_us, time_loop

GPU_READ_BYTES = 4 << 30
CPU_READ_BYTES = 256 << 20
PROGRAMS_PER_SM = 4  # that only read
GPU_MATMUL = (8192, torch.bfloat16)
CPU_MATMUL = (1024, torch.float32)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of a few attempts."""

    read_gb_s: float
    matmul_tflop_s: float

    def percent(self, rate: float, unit: str) -> float:
        """A rate in percent of the ceiling of its unit."""
        return 100 * rate / (self.read_gb_s if unit == "GB/s" else self.matmul_tflop_s)


def measure_ceilings(device: torch.device) -> Ceilings:
    """About a tenth of a second on a GPU, a second on a CPU."""
    return Ceilings(_measure_read(device), _measure_matmul(device))


def _best_us(calls: Sequence[Call], device: torch.device) -> float:
    if device.type == "cpu":
        return min(time_loop([call], device).us for call in calls)
    event_us(calls)
    return min(event_us([call for call in calls for _ in range(10)]))


def _measure_read(device: torch.device) -> float:
    num_bytes = CPU_READ_BYTES
    if device.type == "cuda":
        num_bytes = min(GPU_READ_BYTES, torch.cuda.mem_get_info(device)[0] // 4 >> 20 << 20)
    values = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    calls: list[Call] = [values.view(torch.float32).sum]
    if device.type == "cuda":
        from attention_bench.read_kernel import read

        calls.append(partial(read, values, PROGRAMS_PER_SM * num_sms(device)))
    return num_bytes / _best_us(calls, device) / 1e3


def _measure_matmul(device: torch.device) -> float:
    size, dtype = GPU_MATMUL if device.type == "cuda" else CPU_MATMUL
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _best_us([partial(torch.mm, a, b)], device) / 1e6
