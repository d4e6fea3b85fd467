"""Are tokens the same however a model is run? Counts answers that differ.

    python benchmarks/equal_tokens.py --model smollm2 --out equal.json
    python benchmarks/equal_tokens.py --temperature 1 --prompts 50 --tokens 64

Every setting answers the same prompts as the first one, which runs them one by one without graphs.
With a temperature, every prompt has a seed of its own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from anabranch import LLM, SamplingParams
from anabranch.llm.bench.run_results import make_header

QUESTIONS = (
    "What is the capital of France?",
    "Count from 1 to 30.",
    "Write a short poem about a river that divides and joins again.",
    "Explain in three sentences how a bicycle stays upright.",
    "List the planets of the solar system, one a line.",
    "Repeat this five times: the quick brown fox jumps over the lazy dog.",
    "Translate to French: I would like a cup of tea, please.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tell me a story about a lighthouse keeper and her cat.",
    "Summarise: Rivers carry sand and stones. Where they slow down, they drop them, and islands "
    "grow. The water parts around the islands and meets again behind them.",
)
DRAFTS: dict[str, Any] = {"num_drafts": 4, "adaptive": False}


def settings(draft: str) -> dict[str, dict[str, Any]]:
    """What is compared with the first setting."""
    return {
        "one by one, no graphs": {"cuda_graphs": False},
        "batched, no graphs": {"cuda_graphs": False},
        "batched, graphs": {},
        "n-gram drafts": {"speculative": {"method": "ngram", **DRAFTS}},
        "n-gram drafts, batch expansion": {
            "speculative": {"method": "ngram", "scorer": "batch-expansion", **DRAFTS}
        },
        "draft model": {"speculative": {"method": "draft", "model": draft, **DRAFTS}},
        "adaptive drafts": {"speculative": {"method": "ngram"}},
        "adaptive draft model, few pages": {
            "speculative": {"method": "draft", "model": draft},
            "max_model_len": 512,
            "kv_cache_gib": 0.1,
        },
        "merge apart": {"fused_merge": False},
        "prompts in chunks": {"max_num_batched_tokens": 24},
        "few pages": {"max_model_len": 512, "kv_cache_gib": 0.05},
    }


def prompts_for(llm: LLM, num_prompts: int) -> list[list[int]]:
    """The questions, again and again with a number until there are enough."""
    rounds = (f" ({number})" if number else "" for number in count())
    texts = (text + again for again in rounds for text in QUESTIONS)
    return [
        llm.chat_prompt([{"role": "user", "content": text}]) for text in islice(texts, num_prompts)
    ]


def answers(llm: LLM, given: argparse.Namespace, *, one_by_one: bool) -> list[list[int]]:
    prompts = prompts_for(llm, given.prompts)
    params = [
        SamplingParams(
            temperature=given.temperature, seed=seed, max_tokens=given.tokens, ignore_eos=True
        )
        for seed, _ in enumerate(prompts)
    ]
    if one_by_one:
        found = [llm.generate([each], one)[0] for each, one in zip(prompts, params, strict=True)]
    else:
        found = llm.generate(prompts, params)
    return [output.outputs[0].token_ids for output in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-model", help="by default the model itself")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    first: list[list[int]] | None = None
    for name, options in settings(given.draft_model or given.model).items():
        given_options: dict[str, Any] = {"max_num_seqs": 16, **options}
        llm = LLM(given.model, device=given.device, dtype=given.dtype, **given_options)
        for again in (False, True):  # the second time prompts are found in the cache
            found = answers(llm, given, one_by_one=name.startswith("one"))
            first = first or found
            differ = sum(a != b for a, b in zip(first, found, strict=True))
            stats = llm.stats
            rows.append(
                {
                    "setting": name + (", prompts cached" if again else ""),
                    "answers": len(found),
                    "different": differ,
                    "accepted_drafts": stats.speculative.num_accepted_tokens,
                    "preemptions": stats.num_preemptions,
                    "cached_tokens": stats.num_cached_tokens,
                    "graph_steps": stats.num_graph_steps,
                }
            )
            print({key: value for key, value in rows[-1].items() if value != 0}, flush=True)
        del llm
    if given.out:
        device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        header = make_header("equal tokens", device)
        given.out.write_text(json.dumps({"header": asdict(header), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
