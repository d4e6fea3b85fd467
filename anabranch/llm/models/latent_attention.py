"""DeepSeek's attention layers over latent rows: what is kept of a token is one row for all heads.

transformers' own layers hand attention the keys and values of every head. The layers here hand it
the rows and the weight that would expand them, so that attention may do without.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2RotaryEmbedding,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from anabranch.compositions.prompt_workspace import check_workspace
from anabranch.compositions.up_projection import UpProjection
from anabranch.llm.models.latent_inputs import latent_inputs

USUAL_PAGE = 64  # rows, for which a budget is checked before pages are made


class LatentAttention(nn.Module):
    """A layer with the same projections and norms as the one it replaces.

    Its attention function is the model's; it is called with the rows for keys, their latent part
    for values, `up_projection`, and the budget under which rows may be expanded.
    """

    def __init__(self, layer: Any, max_workspace_mib: float) -> None:
        super().__init__()
        self.config = layer.config
        self.layer_idx = layer.layer_idx
        self.scaling: float = layer.scaling
        self._rotates_neighbours: bool = getattr(layer.config, "rope_interleave", True)
        self._rank: int = layer.kv_lora_rank
        self._dims: list[int] = [layer.qk_nope_head_dim, layer.qk_rope_head_dim]
        for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"):
            if getattr(layer, name) is not None:
                self.add_module(name, getattr(layer, name))
        self.kv_a_proj_with_mqa = layer.kv_a_proj_with_mqa
        self.kv_a_layernorm = layer.kv_a_layernorm
        self._epsilon: float | None = getattr(layer.kv_a_layernorm, "variance_epsilon", None)
        self.o_proj = layer.o_proj
        weight: torch.Tensor = layer.kv_b_proj.weight.detach()  # of this rank's heads
        weight = weight.view(-1, layer.qk_nope_head_dim + layer.v_head_dim, layer.kv_lora_rank)
        self.up_weight = nn.Parameter(weight, requires_grad=False)
        self.max_workspace_mib = max_workspace_mib
        expanded = self.up_projection.expanded(self._rank + self._dims[1], USUAL_PAGE)
        check_workspace(expanded, max_workspace_mib)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """What the layer that was replaced would give, without attention weights."""
        q = self._queries(hidden_states)
        latent = cast("torch.Tensor", self.kv_a_proj_with_mqa(hidden_states))
        if self._epsilon is not None and _is_on_gpu(latent):
            cos, sin = position_embeddings
            options: Any = {"epsilon": self._epsilon, "neighbours": self._rotates_neighbours}
            norm = self.kv_a_layernorm.weight
            q, rows = latent_inputs(q[0], latent[0], cos[0], sin[0], norm, **options)
            q, rows = q[None], rows[None, None]
        else:
            q, rows = self._inputs(q, latent, *position_embeddings)
        function: Any = cast("Any", AttentionInterface())[self.config._attn_implementation]
        values = rows[..., : self._rank]
        options = {
            "scaling": self.scaling,
            "up_projection": self.up_projection,
            "max_workspace_mib": self.max_workspace_mib,
        }
        out = function(self, q.transpose(1, 2), rows, values, attention_mask, **options)[0]
        return self.o_proj(out.flatten(2)), None

    @property
    def up_projection(self) -> UpProjection:
        return UpProjection(self.up_weight, self._dims[0])

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """[1, num_tokens, num_heads, head_dim]."""
        modules: Any = self
        if hasattr(self, "q_proj"):
            q = modules.q_proj(x)
        else:
            q = modules.q_b_proj(modules.q_a_layernorm(modules.q_a_proj(x)))
        return q.unflatten(-1, (-1, sum(self._dims)))

    def _inputs(
        self, q: torch.Tensor, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries, and rows [1, 1, num_tokens, width]: what latent_inputs() gives."""
        latent, k_rotary = torch.split(latent, [self._rank, self._dims[1]], -1)
        q_pass, q_rotary = torch.split(q, self._dims, -1)
        q = torch.cat([q_pass, self._rotate(q_rotary, cos, sin)], -1)
        k_rotary = self._rotate(k_rotary[:, :, None], cos, sin)[:, :, 0]
        return q, torch.cat([self.kv_a_layernorm(latent), k_rotary], -1)[:, None]

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of the last dimension, the first of all pairs before the second.

        x         [1, num_tokens, num_heads, dim]
        cos, sin  [1, num_tokens, dim / 2] or more columns
        """
        half = x.shape[-1] // 2
        cos, sin = cos[:, :, None, :half], sin[:, :, None, :half]
        if self._rotates_neighbours:
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


class RealRotary(nn.Module):
    """Rotary embeddings as cosines and sines in float32 instead of complex numbers."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, num_tokens, dim / 2]."""
        turns = self.rotary(x, position_ids=position_ids)
        return turns.real.contiguous(), turns.imag.contiguous()


def use_latent_attention(model: nn.Module, *, max_workspace_mib: float = 256) -> int:
    """Replace the attention layers of DeepSeek-V2 and V3 models, in place; how many.

    `max_workspace_mib` is the budget for expanded keys; too small a one is a ValueError.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, DeepseekV2Attention | DeepseekV3Attention):
                setattr(parent, name, LatentAttention(child, max_workspace_mib))
                count += 1
            elif isinstance(child, DeepseekV2RotaryEmbedding):
                setattr(parent, name, RealRotary(child))
    return count
