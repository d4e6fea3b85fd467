"""A transformers model with anabranch's attention: the same tokens as with transformers' own.

`--model DIR` names a model and its tokenizer; without it, a tiny model of random weights is made.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import torch
import transformers

from anabranch.integrations.transformers import register

untyped = cast("Any", transformers)
PROMPTS = ["The capital of France is", "Attention is", "A river that divides and joins again is an"]


def load(path: str | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model and a batch of prompts, padded on the left."""
    if path:
        tokenizer = untyped.AutoTokenizer.from_pretrained(path, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
        return untyped.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = untyped.LlamaConfig(**sizes, **heads, pad_token_id=0)
    mask = torch.arange(9) >= torch.tensor([[2], [7], [0]])
    ids = torch.randint(3, 100, mask.shape) * mask
    return untyped.LlamaForCausalLM(config), {"input_ids": ids, "attention_mask": mask.long()}


def main() -> None:
    """Generate greedily with both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory of a model and its tokenizer")
    model, batch = load(parser.parse_known_args()[0].model)
    register()
    tokens: dict[str, torch.Tensor] = {}
    for name in ("eager", "anabranch"):
        model.set_attn_implementation(name)
        tokens[name] = model.generate(**batch, max_new_tokens=20, do_sample=False)
    same = torch.equal(tokens["eager"], tokens["anabranch"])
    print(f"{tuple(tokens['eager'].shape)} tokens: {'equal' if same else 'not equal'}")


if __name__ == "__main__":
    main()
