"""transformers: anabranch as an attention implementation of its models.

    from anabranch.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="anabranch")

Continuous batching (`generate_batch`) takes `attn_implementation="paged|anabranch"`.
"""

from __future__ import annotations

from typing import Any, cast

NAME = "anabranch"


def register() -> None:
    """Make "anabranch" and "paged|anabranch" known to transformers; a second call changes nothing.

    For inference alone. Masks that are a causal rule, a window and padding in front of or behind a
    sequence go to `attend`; all others are computed from the mask itself.
    """
    import transformers

    from anabranch.integrations.transformers.attention import attention
    from anabranch.integrations.transformers.paged_attention import paged_attention
    from anabranch.integrations.transformers.spans import make_mask

    untyped = cast("Any", transformers)
    untyped.AttentionInterface.register(NAME, attention)
    untyped.AttentionInterface.register(f"paged|{NAME}", paged_attention)
    untyped.AttentionMaskInterface.register(NAME, make_mask)
