"""transformers as a peer: the same weights, its own cache and its own loops."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anabranch.bench.engine.engine_options import EngineOptions, release
from anabranch.bench.engine.prompts import Workload
from anabranch.bench.timing import synchronize

IGNORE_EOS = -1
RESULT_TIMEOUT = 60.0  # seconds without any result


class TransformersPeer:
    """A model as `from_pretrained` gives it, with one of the attention implementations."""

    def __init__(self, options: EngineOptions, attention: str, progress: Any = None) -> None:
        from anabranch.engine.config import DTYPES
        from anabranch.integrations.transformers import register
        from anabranch.models import load_model

        register()
        self.device = options.torch_device()
        loaded = load_model(
            options.model,
            device=self.device,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            attn_implementation=attention,
            progress=(lambda what: progress(f"{what} for transformers", 0, 0))
            if progress
            else None,
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
        """Of all prompts by continuous batching, its set-up and graph capture not counted."""
        with self._manager(work) as manager:
            _answer(manager, work.prompts[:2], [2, 2][: len(work.prompts)])
            start = time.perf_counter()
            _answer(manager, work.prompts, work.output_lens)
            return time.perf_counter() - start

    @contextmanager
    def _manager(self, work: Workload) -> Generator[Any]:
        from transformers.generation.configuration_utils import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        config = GenerationConfig(
            max_new_tokens=max(work.output_lens), do_sample=False, eos_token_id=IGNORE_EOS
        )
        hints = WorkloadHints(
            max_prompt_length=max(map(len, work.prompts)),
            max_generated_length=max(work.output_lens),
            num_requests=len(work.prompts),
        )
        before = self.model.config._attn_implementation
        try:
            with self.model.continuous_batching_context_manager(
                generation_config=config, workload_hints=hints, timeout=5
            ) as manager:
                yield manager
        finally:
            self.model.set_attn_implementation(before)

    @torch.inference_mode()
    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """From a prompt to its first token."""
        return self._prefill(prompt)[0]

    @torch.inference_mode()
    def decode_seconds(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Of `num_tokens` tokens behind the first."""
        _, token, cache = self._prefill(prompt)
        start = time.perf_counter()
        for _ in range(num_tokens):
            output = self.model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
        synchronize(self.device)
        return time.perf_counter() - start

    def _prefill(self, prompt: Sequence[int]) -> tuple[float, torch.Tensor, Any]:
        ids = torch.tensor([list(prompt)], device=self.device)
        synchronize(self.device)
        start = time.perf_counter()
        output = self.model(ids, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        synchronize(self.device)
        return time.perf_counter() - start, token, output.past_key_values

    def close(self) -> None:
        """Give the memory back."""
        self.model = None
        release()


def _answer(manager: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    waiting: set[str] = set()
    for prompt, length in zip(prompts, lengths, strict=True):
        waiting.add(
            manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=IGNORE_EOS)
        )
    deadline = time.monotonic() + RESULT_TIMEOUT
    while waiting:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
            waiting.discard(result.request_id)
            deadline = time.monotonic() + RESULT_TIMEOUT
        elif result is None and (not manager.is_running() or time.monotonic() > deadline):
            raise RuntimeError("transformers' continuous batching stopped without an answer")
