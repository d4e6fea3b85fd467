"""Linear layers and embeddings on a CPU over one copy of their weights, in the kernel's order."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from anabranch.kernels.cpu.linear import pack, packed_linear, packed_rows, silu_gate, unpack


class PackedLinear(nn.Linear):
    """nn.Linear whose weight is packed in panels [panels, in_features, 32], and nowhere else.

    All products of SmolLM2-135M for one step on two busy cores of an EPYC, float32, milliseconds
    by oneDNN over its own packed weights / ours: 1 row 38 / 15, 4 rows 27 / 15, 8 rows 32 / 18,
    40 rows 79 / 71, 256 rows 396 / 362.
    """

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        if input.shape[-1] != self.in_features or input.dtype != torch.float32:
            raise ValueError(
                f"input must be float32 [..., {self.in_features}], "
                f"got {input.dtype} {tuple(input.shape)}"
            )
        if torch.compiler.is_compiling():
            return torch.ops.anabranch.packed_linear(
                input, self.packed, self.out_features, self.bias
            )
        return packed_linear(input, self.packed, self.out_features, self.bias)

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
        return unpack(self.packed, self.out_features)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Linear:
        """What is moved or converted becomes a plain layer again."""
        return cast("Any", _plain(self, nn.Linear))._apply(fn, recurse)


class PackedEmbedding(nn.Embedding):
    """nn.Embedding that reads the packed weight of the output layer it is tied to."""

    packed: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the weight."""
        return packed_rows(self.packed, input)

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A new tensor [num_embeddings, embedding_dim]."""
        return unpack(self.packed, self.num_embeddings)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Embedding:
        """What is moved or converted becomes a plain layer again, tied no more."""
        return cast("Any", _plain(self, nn.Embedding))._apply(fn, recurse)


PACKED = (PackedLinear, PackedEmbedding)


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
        packed = nn.Parameter(pack(weight.detach()), requires_grad=False)
        _set_packed(layer, PackedLinear, packed)
        for embedding in tied.pop(weight, []):
            _set_packed(embedding, PackedEmbedding, packed)
    packed = {id(module.packed) for module in model.modules() if isinstance(module, PACKED)}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in packed:
            tensor.data = tensor.detach().clone()


def _set_packed(module: nn.Module, kind: type[nn.Module], packed: nn.Parameter) -> None:
    del module.weight
    module.__class__ = kind
    module.register_parameter("packed", packed)


def _plain(module: PackedLinear | PackedEmbedding, kind: type[nn.Module]) -> nn.Module:
    weight = nn.Parameter(module.weight, requires_grad=False)
    del module.packed
    cast("nn.Module", module).__class__ = kind
    module.register_parameter("weight", weight)
    return module


@torch.library.custom_op("anabranch::packed_linear", mutates_args=())
def _packed_linear_op(
    x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return packed_linear(x, packed, n, bias)


@_packed_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    del packed, bias
    return x.new_empty(*x.shape[:-1], n)
