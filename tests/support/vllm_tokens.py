"""Run in a process of its own: greedy tokens of a model by vLLM on one backend, as JSON.

    python tests/support/vllm_tokens.py MODEL_DIRECTORY BACKEND OPTIONS_JSON

Batches of 16 and of 1 run in chunks of 64 tokens unless the options say otherwise, the 16 twice, so
that the second time prefixes are found. A model without a tokenizer gets token numbers for prompts.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# One process, so that layers can be looked at; threads that do not spin on a shared machine.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_WAIT_POLICY="PASSIVE",
)

SHARED = "The river rises in the hills, runs past the mill and the old bridge, and meets the sea. "
TOPICS = "rivers bridges mills hills storms trains letters clocks bees maps salt glass wool tea ice"
PROMPTS = [
    SHARED * (index % 4) + f"Here is a story about {topic}. Once upon a time"
    for index, topic in enumerate(TOPICS.split())
]
REPEATING = "one two three four five six seven eight nine ten " * 4 + "one two three"

DEFAULTS = {"enforce_eager": True, "dtype": "float32", "max_num_batched_tokens": 64}


def main(model: str, backend: str, options_json: str) -> None:
    import torch
    from vllm import LLM, SamplingParams

    from anabranch.integrations.vllm import register

    torch.set_num_threads(2)
    if "anabranch" not in entry_points(group="vllm.general_plugins").names:
        register()  # a folder on the path has no entry points
    prompts: list[Any] = [*PROMPTS, REPEATING]
    options: dict[str, Any] = {**DEFAULTS, **json.loads(options_json)}
    if not (Path(model) / "tokenizer.json").exists():
        options["skip_tokenizer_init"] = True
        prompts = [{"prompt_token_ids": [ord(char) for char in text]} for text in prompts]
    llm: Any = LLM(
        model=model,
        attention_backend=backend,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_seqs=16,
        max_model_len=512,
        block_size=32,
        disable_log_stats=False,
        **options,
    )
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    batches = [prompts, prompts, prompts[-1:]]
    tokens = [
        [list(answer.outputs[0].token_ids) for answer in llm.generate(batch, greedy)]
        for batch in batches
    ]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    report = {
        "tokens": tokens,
        "backends": sorted({layer.attn_backend.__name__ for layer in layers.values()}),
        "prefix_hits": metrics.get("vllm:prefix_cache_hits"),
        "drafts": metrics.get("vllm:spec_decode_num_draft_tokens"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
