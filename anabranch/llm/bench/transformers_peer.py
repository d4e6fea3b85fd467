"""transformers as a peer: the same weights, its own cache and its own loops."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from anabranch.llm.bench.workload import Workload, synchronize
from anabranch.llm.cli.engine_options import EngineOptions
from anabranch.llm.cli.progress import Progress

IGNORE_EOS = -1


class TransformersPeer:
    """A model as `from_pretrained` gives it, with one of the attention implementations."""

    def __init__(self, options: EngineOptions, attention: str, progress: Progress) -> None:
        from anabranch.integrations.transformers import register
        from anabranch.llm.engine.config import DTYPES
        from anabranch.llm.models import load_model

        register()
        self.device = options.torch_device()
        loaded = load_model(
            options.model,
            device=self.device,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            attn_implementation=attention,
            progress=lambda what: progress(f"{what} for transformers", 0, 0),
        )
        self.model: Any = loaded.model
        self.tokenizer = loaded.tokenizer
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_len: int = config.max_position_embeddings
        self.model.generation_config.eos_token_id = None  # answers have the length asked for
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy answers to a batch, padded on the left, by `generate`."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        return out[:, width:].tolist()

    def generate_seconds(self, work: Workload, batch: int) -> float:
        """Of all prompts in batches as they come; a batch waits for its longest answer."""
        start = time.perf_counter()
        for first in range(0, len(work.prompts), batch):
            lengths = work.output_lens[first : first + batch]
            self.generate(work.prompts[first : first + batch], max(lengths))
        synchronize(self.device)
        return time.perf_counter() - start

    def continuous_seconds(self, work: Workload) -> float:
        """Of all prompts by continuous batching; a first call sizes its manager and warms it up."""
        from transformers.generation.configuration_utils import GenerationConfig

        longest = max(work.output_lens)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=IGNORE_EOS)
        before = self.model.config._attn_implementation
        seconds = 0.0
        try:
            for _ in range(2):
                start = time.perf_counter()
                found = self.model.generate_batch(
                    work.prompts, generation_config=config, persistent_manager=True
                )
                seconds = time.perf_counter() - start
                if any(len(each.generated_tokens) != longest for each in found.values()) or (
                    len(found) != len(work.prompts)
                ):
                    raise RuntimeError("transformers' continuous batching lost answers")
        finally:
            self.model.destroy_cached_continuous_batching_manager()
            self.model.set_attn_implementation(before)
        return seconds
