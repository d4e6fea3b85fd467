"""Perplexity of a model on a text with keys and values in each store format.

    python benchmarks/kv_formats.py                              # SmolLM2, examples/river.txt
    python benchmarks/kv_formats.py --text FILE --tokens 1024 --formats plain q8_0

Every layer writes its keys and values into pages of the format and attends over those pages, so a
token reads what decode would read. One forward pass a format.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import anabranch as ab
from anabranch.keys.formats import FORMATS, empty_store
from anabranch.llm.models import load_model

PAGE = 16
RIVER = Path(__file__).parent.parent / "examples" / "river.txt"


class FormatAttention:
    """Attention as transformers calls it, over pages of a format for keys and one for values."""

    def __init__(self, k_format: str, v_format: str) -> None:
        self.formats = (k_format, v_format)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, num_heads, q_len, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, q_len, head_dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Causal attention of one sequence that begins here."""
        del module, attention_mask
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        num_pages = -(-len(k) // PAGE)
        stores = [
            empty_store(name, (num_pages, PAGE, *x.shape[1:]), x.dtype, x.device)
            for name, x in zip(self.formats, (k, v), strict=True)
        ]
        (k_cache, k_scales), (v_cache, v_scales) = stores
        table = torch.arange(num_pages, dtype=torch.int32, device=q.device)[None]
        bounds = torch.tensor([0, len(k)], dtype=torch.int32, device=q.device)
        keys = ab.PagedKV(k_cache, v_cache, table, bounds[1:], k_scales, v_scales, q.dtype)
        ab.append_kv(keys, k, v, torch.arange(len(k), device=q.device))
        return ab.attend(q, keys, cu_seqlens_q=bounds, scale=scaling).out[None], None


@torch.inference_mode()
def perplexity(model: Any, tokens: torch.Tensor, k_format: str, v_format: str) -> float:
    """exp of the mean negative log-likelihood of every token but the first."""
    ALL_ATTENTION_FUNCTIONS.register("store_format", FormatAttention(k_format, v_format))
    model.set_attn_implementation("store_format")
    logits = model(tokens[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, tokens[1:]).exp().item()


def main() -> None:
    """Print a line of JSON for each format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=RIVER)
    parser.add_argument("--tokens", type=int, default=2048, help="at most so many of the text")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="K[/V]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    loaded = load_model(options.model, device=options.device)
    text = options.text.read_text(encoding="utf-8")
    tokens = torch.tensor(loaded.tokenizer(text)["input_ids"][: options.tokens])
    for name in options.formats:
        k_format, _, v_format = name.partition("/")
        found = perplexity(loaded.model, tokens.to(options.device), k_format, v_format or k_format)
        print(json.dumps({"format": name, "tokens": len(tokens), "perplexity": found}), flush=True)


if __name__ == "__main__":
    main()
