"""Parts of transformers' models that run in ways of ours."""

from __future__ import annotations

from typing import Any

from anabranch.llm.models.cpu_layers import use_cpu_norms
from anabranch.llm.models.experts import use_experts
from anabranch.llm.models.fused_layers import fuse_decoder_layers
from anabranch.llm.models.fused_projections import gate_joined, join_projections
from anabranch.llm.models.latent_attention import use_latent_attention
from anabranch.llm.models.router import use_router
from anabranch.llm.models.row_linear import use_row_linear


def replace_parts(model: Any, *, joins: bool = True, max_workspace_mib: float = 256) -> None:
    """Replace them in place; `joins` lets projections of one input be one product."""
    use_experts(model)
    use_router(model)
    use_latent_attention(model, max_workspace_mib=max_workspace_mib)
    if joins:
        join_projections(model)
    use_row_linear(model)
    gate_joined(model)
    use_cpu_norms(model)
    fuse_decoder_layers(model)
