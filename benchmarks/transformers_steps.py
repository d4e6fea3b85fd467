"""Decode steps of transformers, eager, with this library's attention and with torch's SDPA.

    python benchmarks/transformers_steps.py --out benchmarks/results/engine/h200-transformers.json

The shape of Llama 3.1 8B with random weights. A step is the time of many tokens less that of few,
divided by their difference; implementations take turns. In the rows of new lengths, every turn has
a prompt of its own length, so no step is of a length that was seen before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from rows import header, save_rows
from transformers import LlamaConfig, LlamaForCausalLM

from anabranch.integrations.transformers import register

CONFIG = "llm/models/configs/llama-3.1-8b.json"
FEW, MANY, ROUNDS = 4, 36, 5


def make_model() -> LlamaForCausalLM:
    """On the GPU, in 16 bits."""
    import anabranch

    config = json.loads((Path(anabranch.__file__).parent / CONFIG).read_text())
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        torch.set_default_dtype(torch.float32)
    model.generation_config.pad_token_id = 0
    return model


def seconds(model: LlamaForCausalLM, prompt: torch.Tensor, num_tokens: int) -> float:
    """Of one answer."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    given = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "do_sample": False}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    register()
    model, rows = make_model(), []
    cases = [(batch, 1024, longer) for longer in (0, MANY + 4) for batch in (1, 8)]
    for batch, length, longer in cases:
        samples: dict[str, list[float]] = {"anabranch": [], "sdpa": []}
        for turn in range(ROUNDS + 1):
            size = (batch, length + turn * longer)
            prompt = torch.randint(0, model.config.vocab_size, size, device="cuda")
            for name, steps in samples.items():
                model.set_attn_implementation(name)
                seconds(model, prompt, FEW)
                few, many = (seconds(model, prompt, count) for count in (FEW, MANY))
                if turn:  # the first compiles
                    steps.append((many - few) * 1000 / (MANY - FEW))
        times = {name: round(median(steps), 3) for name, steps in samples.items()}
        ratio = round(times["sdpa"] / times["anabranch"], 3)
        case = f"{batch} x {length}" + (", new lengths" if longer else "")
        rows.append({"case": case, "ms a step": times, "ratio": ratio})
        print(rows[-1], flush=True)
    save_rows(options.out, header("eager steps, wall clock") | {"timing": "medians, ms"}, rows)


if __name__ == "__main__":
    main()
