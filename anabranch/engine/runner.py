"""Runs a model over the tokens of a step: eagerly, or by a captured graph of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from anabranch.cache.kv_cache import LayerCache
from anabranch.engine.attention import Layers, bind_layers, running
from anabranch.engine.graphs import GraphKey, Graphs
from anabranch.engine.inputs import StepInputs
from anabranch.engine.layout import Scorer, lay_out
from anabranch.engine.scheduler import Scheduled

Progress = Callable[[str, int, int], None]  # what, done, of


class StepLogits(NamedTuple):
    """Logits of the wanted rows, or of `every` tokens of each sequence."""

    rows: torch.Tensor  # [num_rows, vocab]
    every: int | None


class Runner:
    """A model bound to its cache."""

    def __init__(
        self,
        model: Any,
        layers: Layers,
        caches: Sequence[LayerCache],
        inputs: StepInputs,
        *,
        scorer: Scorer,
        table_width: int,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.scorer = scorer
        self.page_size = caches[0].k.shape[1]
        self.table_width = table_width
        self.graphs = Graphs()
        self._layers = list(layers)
        self._slot = bind_layers(self._layers, caches)

    @torch.inference_mode()
    def run(self, step: Sequence[Scheduled]) -> StepLogits:
        """Logits of the rows that the step asks for."""
        key = self._graph_key(step)
        layout = lay_out(step, self.scorer, self.page_size, self.table_width, key is not None)
        if key is None:
            self.inputs.load(layout, layout.num_tokens, layout.num_seqs)
            logits = self.forward(layout.num_tokens, layout.num_seqs, len(layout.logit_rows))
            return StepLogits(logits, None)
        self.inputs.load(layout, key.num_tokens, key.num_seqs(self.scorer))
        return StepLogits(self.graphs.replay(key)[: layout.num_tokens], key.q_len)

    def forward(self, num_tokens: int, num_seqs: int, num_logits: int | None) -> torch.Tensor:
        """The model over what the buffers hold; None asks for the logits of every token."""
        rows = 0 if num_logits is None else self.inputs.logit_rows(num_logits)
        with running(self._slot, self.inputs.step(num_seqs, num_tokens)):
            outputs = self.model(
                input_ids=self.inputs.ids[None, :num_tokens],
                position_ids=self.inputs.positions(num_tokens)[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        return outputs.logits[0]

    def compile_layers(self) -> None:
        """Compile decoder layers, one code for all of them: what is elementwise is fused."""
        for layer in self._decoder_layers():
            layer.compile(dynamic=True)  # pyright: ignore[reportUnknownMemberType]

    def _decoder_layers(self) -> list[nn.Module]:
        """Elements of a list of modules that hold the attention layers."""
        inside = set(self._layers)
        found: list[nn.Module] = []
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList):
                found += [layer for layer in module if inside & set(layer.modules())]
        return found

    @torch.inference_mode()
    def capture(self, keys: Sequence[GraphKey], progress: Progress | None = None) -> None:
        """Capture a graph for each shape, ascending, so that a step is one launch."""
        for done, key in enumerate(sorted(keys)):
            if progress:
                progress("capturing graphs", done, len(keys))
            num_seqs = key.num_seqs(self.scorer)
            empty = lay_out([], self.scorer, self.page_size, self.table_width, True)
            self.inputs.load(empty, key.num_tokens, num_seqs)
            self.graphs.capture(key, lambda: self.forward(key.num_tokens, num_seqs, None))  # noqa: B023
        if progress:
            progress("capturing graphs", len(keys), len(keys))

    def _graph_key(self, step: Sequence[Scheduled]) -> GraphKey | None:
        lengths = {run.num_tokens for run in step}
        if len(lengths) != 1 or not all(run.samples for run in step):
            return None
        if any(run.seq.params.prompt_logprobs is not None and not run.decoding for run in step):
            return None
        return self.graphs.fitting(len(step), lengths.pop())
