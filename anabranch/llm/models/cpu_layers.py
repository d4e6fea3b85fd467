"""Layers of a model on a CPU: linear maps and embeddings over packed weights, and norms."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from anabranch.kernels.cpu.linear import (
    F32,
    FLOAT_INPUTS,
    WeightPart,
    describe,
    pack,
    packed_linear,
    packed_rows,
    rms_norm,
    silu_gate,
)
from anabranch.kernels.cpu.native import native

TOLERANCE = 1e-5  # of the largest output: what float32 and another order of a sum may differ by


class PackedWeight(nn.Module):
    """A weight [n, k] in the order of CPU kernels; no other copy is kept.

    Products with codes quantise their inputs to 8 bits in blocks of 32, unless `float_inputs`.
    """

    def __init__(self, parts: Sequence[WeightPart], k: int, *, float_inputs: bool = False) -> None:
        super().__init__()
        self.formats = [(part.format, part.n) for part in parts]
        self.n, self.k = sum(part.n for part in parts), k
        self.float_inputs = float_inputs
        self.data = nn.ParameterList(nn.Parameter(each.data, False) for each in parts)
        self._table: torch.Tensor | None = None

    @classmethod
    def of_floats(cls, weight: torch.Tensor) -> PackedWeight:
        """A float32 weight [n, k]."""
        return cls([WeightPart(F32, len(weight), pack(weight))], weight.shape[1])

    @property
    def table(self) -> torch.Tensor:
        """What kernels read: int64, with the addresses of the parts."""
        if self._table is None:
            self._table = describe(self.parts, self.k, float_inputs=self.float_inputs)
        return self._table

    @property
    def parts(self) -> list[WeightPart]:
        """The parts, which share this weight's memory."""
        return [
            WeightPart(kind, n, data.detach())
            for (kind, n), data in zip(self.formats, self.data, strict=True)
        ]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows, float32 [*ids.shape, k]."""
        return packed_rows(self.table, self.k, ids)

    def expanded(self) -> torch.Tensor:
        """A new tensor, float32 [n, k]."""
        return self.rows(torch.arange(self.n))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other addresses, so it makes its own table."""
        return {**self.__dict__, "_table": None}


def join_weights(weights: Sequence[PackedWeight]) -> PackedWeight:
    """The outputs of several weights of one input, after each other; no part is copied."""
    parts = [part for weight in weights for part in weight.parts]
    return PackedWeight(parts, weights[0].k, float_inputs=weights[0].float_inputs)


@contextmanager
def exact_products(model: nn.Module) -> Generator[None]:
    """Keep the inputs of a model's products floats, so that results can be compared."""
    weights = [module for module in model.modules() if isinstance(module, PackedWeight)]
    for weight in weights:
        weight.table[FLOAT_INPUTS] = 1
    try:
        yield
    finally:
        for weight in weights:
            weight.table[FLOAT_INPUTS] = int(weight.float_inputs)


class PackedLayer(nn.Module):
    """A layer that reads a packed weight in the place of its own."""

    packed: PackedWeight

    @property
    def weight(self) -> torch.Tensor:
        """A new tensor [outputs or embeddings, columns]."""
        return self.packed.expanded()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """A layer that is moved or converted becomes a plain one again, tied no more."""
        weight = nn.Parameter(self.weight, requires_grad=False)
        del self.packed
        layer = cast("Any", self)
        layer.__class__ = next(plain for plain, packed in PACKED.items() if packed is type(self))
        layer.register_parameter("weight", weight)
        return layer._apply(fn, recurse)


class PackedLinear(PackedLayer, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """nn.Linear over a packed weight, which is its only copy.

    All products of SmolLM2-135M for one step on two cores of an EPYC (Zen 5), float32, milliseconds
    by oneDNN over its own packed weights / ours: 1 row 16.5 / 10.7, 4 rows 12.8 / 10.8, 8 rows
    15.3 / 11.2, 40 rows 30 / 25, 256 rows 155 / 145. Reading the weights takes 10.7.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[-1] != self.in_features or input.dtype != torch.float32:
            raise ValueError(
                f"input must be float32 [..., {self.in_features}], "
                f"got {input.dtype} {tuple(input.shape)}"
            )
        arguments: Any = (input, self.packed.table, self.out_features, self.bias)
        if torch.compiler.is_compiling():
            return torch.ops.anabranch.packed_linear(*arguments)
        return packed_linear(*arguments)

    def gated(self, input: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where the outputs are gate before up."""
        joined = self(input)
        if torch.compiler.is_compiling():
            gate, up = joined.chunk(2, -1)
            return functional.silu(gate) * up
        return silu_gate(joined)


class PackedEmbedding(PackedLayer, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """nn.Embedding over a packed weight, which may be that of the output layer it is tied to."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(input)


PACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: PackedLinear,
    nn.Embedding: PackedEmbedding,
}


def set_packed(module: nn.Module, packed: PackedWeight) -> None:
    """Let a linear layer or an embedding read a packed weight instead of its own."""
    kind = PACKED[type(module)]
    del module.weight
    module.__class__ = kind
    module.add_module("packed", packed)


def pack_layers(model: nn.Module, layers: list[nn.Linear]) -> None:
    """Pack these float32 layers, and embeddings tied to them, in place.

    What is left of a mapped checkpoint is copied out of it, so that the mapping goes.
    """
    tied: dict[torch.Tensor, list[nn.Module]] = {}
    for module in model.modules():
        if type(module) is nn.Embedding and module.max_norm is None:
            tied.setdefault(module.weight, []).append(module)
    for layer in layers:
        weight = layer.weight
        packed = PackedWeight.of_floats(weight.detach())
        set_packed(layer, packed)
        for embedding in tied.pop(weight, []):
            set_packed(embedding, packed)
    weights = [module for module in model.modules() if isinstance(module, PackedWeight)]
    packed = {id(data) for weight in weights for data in weight.data}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in packed:
            tensor.data = tensor.detach().clone()


_packed_linear_op = torch.library.custom_op(
    "anabranch::packed_linear", packed_linear, mutates_args=()
)


@_packed_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, table: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    del table, bias
    return x.new_empty(*x.shape[:-1], n)


class CpuRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x * x) + epsilon)` in float32."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    agreed: dict[tuple[type[nn.Module], int], bool] = {}

    def fast(norm: nn.Module) -> nn.Module | None:
        made = _fast(norm)
        if made is None:
            return None
        kind = (type(norm), len(made.weight))
        if kind not in agreed:
            x = torch.randn(2, 3, len(made.weight))
            agreed[kind] = agrees(norm(x), made(x), TOLERANCE)
        return made if agreed[kind] else None

    return replace_modules(model, fast)


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


def replace_modules(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace every module for which `make` gives another, in place; how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            made = make(child)
            if made is not None:
                setattr(parent, name, made)
                count += 1
    return count


def agrees(expected: Any, actual: torch.Tensor, tolerance: float) -> bool:
    """Whether outputs differ by no more than a share of the largest number expected."""
    if not isinstance(expected, torch.Tensor) or expected.shape != actual.shape:
        return False
    return bool((expected - actual).abs().max() <= tolerance * expected.abs().max())
