"""Root-mean-square norms of a model on a CPU by one kernel instead of six operations."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from anabranch.kernels.cpu.linear import rms_norm
from anabranch.kernels.cpu.native import native

TOLERANCE = 1e-5  # of the largest output: what float32 and another order of a sum may differ by


class CpuRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x * x) + epsilon)` in float32."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of every row."""
        if torch.compiler.is_compiling() or not x.dtype == self.weight.dtype == torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon)


@torch.inference_mode()
def use_cpu_norms(model: nn.Module) -> int:
    """Replace norms of float32 models on a CPU, in place; how many.

    Norms of a class are replaced only if one gives the same numbers for a random input.
    """
    if native() is None:
        return 0
    count = 0
    agreed: dict[tuple[type[nn.Module], int], bool] = {}
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            fast = _fast(norm)
            if fast is None:
                continue
            kind = (type(norm), len(fast.weight))
            if kind not in agreed:
                agreed[kind] = _agree(norm, fast)
            if agreed[kind]:
                setattr(parent, name, fast)
                count += 1
    return count


def _fast(norm: nn.Module) -> CpuRMSNorm | None:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    return CpuRMSNorm(weight, epsilon)


def _agree(norm: nn.Module, fast: CpuRMSNorm) -> bool:
    x = torch.randn(2, 3, len(fast.weight))
    expected = norm(x)
    return bool((expected - fast(x)).abs().max() <= TOLERANCE * expected.abs().max())
