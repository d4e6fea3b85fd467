"""Linear layers and embeddings on a CPU over one copy of their weights, in the kernel's order."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from anabranch.kernels.cpu.linear import packed_linear, silu_gate
from anabranch.llm.models.packed_weight import PackedWeight


class PackedLinear(nn.Linear):
    """nn.Linear whose weight is packed, and nowhere else.

    All products of SmolLM2-135M for one step on two busy cores of an EPYC, float32, milliseconds
    by oneDNN over its own packed weights / ours: 1 row 38 / 15, 4 rows 27 / 15, 8 rows 32 / 18,
    40 rows 79 / 71, 256 rows 396 / 362.
    """

    packed: PackedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
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

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A new tensor [out_features, in_features]."""
        return self.packed.expanded()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Linear:
        """What is moved or converted becomes a plain layer again."""
        return cast("Any", _plain(self, nn.Linear))._apply(fn, recurse)


class PackedEmbedding(nn.Embedding):
    """nn.Embedding over a packed weight, which may be that of the output layer it is tied to."""

    packed: PackedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the weight."""
        return self.packed.rows(input)

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A new tensor [num_embeddings, embedding_dim]."""
        return self.packed.expanded()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Embedding:
        """What is moved or converted becomes a plain layer again, tied no more."""
        return cast("Any", _plain(self, nn.Embedding))._apply(fn, recurse)


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


def _plain(module: PackedLinear | PackedEmbedding, kind: type[nn.Module]) -> nn.Module:
    weight = nn.Parameter(module.weight, requires_grad=False)
    del module.packed
    cast("nn.Module", module).__class__ = kind
    module.register_parameter("weight", weight)
    return module


@torch.library.custom_op("anabranch::packed_linear", mutates_args=())
def _packed_linear_op(
    x: torch.Tensor, table: torch.Tensor, n: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return packed_linear(x, table, n, bias)


@_packed_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, table: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    del table, bias
    return x.new_empty(*x.shape[:-1], n)
