"""Runs a model over the tokens of a step: eagerly, or by a captured graph of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from anabranch.compositions.tree import MAX_NODES, DraftTree
from anabranch.kernels.cpu.waiting import CoreSharing
from anabranch.llm.runner.dealt_step import DealtPages
from anabranch.llm.runner.graphs import (
    Forward,
    GraphKey,
    Graphs,
    Progress,
    PromptKey,
    StepChoice,
    StepWork,
    fitting_key,
    sees_many_keys,
)
from anabranch.llm.runner.kv_cache import CacheRows, LayerCache
from anabranch.llm.runner.model_attention import Layers, bind_layers, running
from anabranch.llm.runner.step import Step
from anabranch.llm.runner.step_inputs import StepInputs
from anabranch.llm.runner.step_layout import (
    SHORT,
    WHOLE,
    DecodeWay,
    HostLens,
    Scorer,
    StepLayout,
    lay_out,
)
from anabranch.llm.sequences.sequence import Scheduled

WARM_CONTEXT = 32768  # keys before a prompt: enough that its heads are expanded in groups


class StepLogits(NamedTuple):
    """Logits of the wanted rows, or of `every` tokens of each sequence."""

    rows: torch.Tensor  # [num_rows, vocab]
    every: int | None
    by_graph: bool


class ModelRunner:
    """A model bound to its cache."""

    def __init__(
        self,
        model: Any,
        layers: Layers,
        caches: Sequence[LayerCache],
        inputs: Sequence[StepInputs],  # small to large: graphs read the first, prompts the last
        unseen: torch.Tensor,  # int64 [max_num_seqs, width]: tokens the host has not seen
        scorer: Scorer,
        *,
        fused_merge: bool = True,
        dealt: DealtPages | None = None,
        choice: StepChoice | None = None,
        trees: bool = False,
    ) -> None:
        self.model = model
        self.choice = choice or StepChoice()
        self.rows = CacheRows(caches)
        self._trees = trees  # graphs of several tokens a sequence take a tree mask
        self._fused_merge = fused_merge
        self.scorer = scorer
        self.page_size = caches[0].k.shape[1] * (dealt.ranks.num_ranks if dealt else 1)
        self.share: Callable[[StepWork], None] | None = None  # with the other ranks, before it runs
        self._dealt = dealt
        self.graphs: Graphs[GraphKey] = Graphs()
        self.prompt_graphs: Graphs[PromptKey] = Graphs()
        self._inputs = inputs
        self._unseen = unseen
        self._cores = CoreSharing() if unseen.device.type == "cpu" else None
        self._layers = list(layers)
        self._slot = bind_layers(self._layers, caches)
        # Latent rows are best expanded for a prompt, which needs its lengths unless all are new.
        self._fresh_prompts = any(shape.is_latent for shape in layers.values())
        self._expands = any(shape.expands_prompts(unseen.device) for shape in layers.values())

    @torch.inference_mode()
    def run(self, step: Sequence[Scheduled]) -> StepLogits:
        """Logits of the rows that the step asks for."""
        return self.execute(self.prepare(step))

    def prepare(self, step: Sequence[Scheduled]) -> StepWork:
        """What has to be run, in a form that every rank can run."""
        way = self.choice.way(step)
        key = self._graph_key(step, way)
        trees = any(run.parents for run in step) or self._masks(key)
        layout = self._lay_out(step, every_row=key is not None, trees=trees)
        return StepWork(layout, key or self._prompt_key(step), way)

    @torch.inference_mode()
    def execute(self, work: StepWork) -> StepLogits:
        """Run a prepared step; all ranks do so in the same order."""
        if self.share is not None:
            self.share(work)
        if self._cores is not None:
            self._cores.observe()
        layout, key = work.layout, work.key
        if isinstance(key, GraphKey):
            self._load(self._inputs[0], layout, key.num_tokens, key.num_seqs(self.scorer))
            return StepLogits(self.graphs.replay(key)[: layout.num_tokens], key.q_len, True)
        if key is not None:
            self._load(self._inputs[-1], layout, key.num_tokens, 1)
            rows = self.prompt_graphs.replay(key)[: len(layout.logit_rows)]
            return StepLogits(rows, None, True)
        return StepLogits(self._call(layout, work.way), None, False)

    def _call(self, layout: StepLayout, way: DecodeWay) -> torch.Tensor:
        """Call the model, for a step that no graph fits."""
        inputs = self._fitting(layout)
        self._load(inputs, layout, layout.num_tokens, layout.num_seqs)
        short = self._short(layout)
        is_fresh = layout.is_fresh(short[1] if short else 0)
        sizes = layout.num_tokens, layout.num_seqs
        tree = None if layout.parents is None else inputs.tree(*(short or sizes))
        attending = inputs.step(*sizes, short, is_fresh=is_fresh, way=way, tree=tree)
        attending.host_lens = layout.lens()
        if self._dealt is not None:
            longest = int(np.diff(layout.cu_seqlens).max())
            attending = self._dealt.step(attending, longest)
        rows = inputs.logit_rows(len(layout.logit_rows))
        return self._forward(inputs, attending, layout.num_tokens, rows, tree)

    def _load(self, inputs: StepInputs, layout: StepLayout, num_tokens: int, num_seqs: int) -> None:
        if self._dealt is not None:
            layout = replace(layout, slots=self._dealt.own_slots(layout.slots))
        inputs.load(layout, num_tokens, num_seqs)

    def _masks(self, key: GraphKey | None) -> bool:
        """Whether a graph takes a tree mask, so that chains must have one, too."""
        return self._trees and key is not None and key.q_len > 1

    def _lay_out(
        self, step: Sequence[Scheduled], *, every_row: bool, trees: bool = False
    ) -> StepLayout:
        width = self._unseen.shape[1]
        short = self.choice.most_short
        return lay_out(step, self.scorer, self.page_size, width, every_row, short, trees=trees)

    def _fitting(self, layout: StepLayout) -> StepInputs:
        return next(
            inputs
            for inputs in self._inputs
            if layout.num_tokens <= inputs.max_num_tokens and layout.num_seqs <= inputs.max_num_seqs
        )

    def _short(self, layout: StepLayout) -> tuple[int, int] | None:
        """Decodes among prefills are attended to apart: on a GPU with tiles of their own."""
        apart = self._unseen.is_cuda or self.choice.sparse or layout.parents is not None
        return layout.short if apart else None

    def forward(
        self,
        ids: torch.Tensor,  # int64 [num_tokens]
        positions: torch.Tensor,  # int64 [num_tokens]
        step: Step,
        rows: torch.Tensor | int,
    ) -> torch.Tensor:
        """Logits of these rows, or, for 0, of every token; all on the device."""
        step.fused_merge = None if self._fused_merge else False
        self.choice.equip(step)
        with running(self._slot, step):
            outputs = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        return outputs.logits[0]

    def _forward(
        self,
        inputs: StepInputs,
        step: Step,
        num_tokens: int,
        rows: torch.Tensor | int,
        tree: DraftTree | None = None,
    ) -> torch.Tensor:
        """The model over what the buffers hold."""
        ids = inputs.ids(num_tokens, self._unseen)
        return self.forward(ids, inputs.positions(num_tokens, tree), step, rows)

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
        """Capture a graph for each shape, so that a step is one launch."""
        self.graphs.capture_all(keys, self._inert, progress)

    def _inert(self, key: GraphKey) -> Forward:
        num_tokens, num_seqs = key.num_tokens, key.num_seqs(self.scorer)
        layout = self._lay_out([], every_row=True, trees=self._masks(key))
        self._inputs[0].load(layout, num_tokens, num_seqs)
        return partial(self._captured, num_tokens, num_seqs, key)

    @torch.inference_mode()
    def capture_prompts(self, sizes: Sequence[PromptKey], progress: Progress | None = None) -> None:
        """Capture a graph for prompts of up to each of these sizes, in the other graphs' memory."""
        self.prompt_graphs.pool = self.prompt_graphs.pool or self.graphs.pool
        self.prompt_graphs.capture_all(sizes, self._inert_prompt, progress)

    def _inert_prompt(self, size: PromptKey) -> Forward:
        self._inputs[-1].load(self._lay_out([], every_row=False), size.num_tokens, 1)
        return partial(self._captured_prompt, size.num_tokens)

    def _captured_prompt(self, num_tokens: int) -> torch.Tensor:
        inputs = self._inputs[-1]
        step = self._even_step(inputs, num_tokens, 1, is_fresh=self._fresh_prompts)
        return self._forward(inputs, step, num_tokens, inputs.logit_rows(1))

    def _even_step(
        self,
        inputs: StepInputs,
        num_tokens: int,
        num_seqs: int,
        *,
        is_fresh: bool = False,
        way: DecodeWay = WHOLE,
        tree: DraftTree | None = None,
    ) -> Step:
        """A step whose sequences all run equally many tokens, as graphs have them."""
        step = inputs.step(num_tokens, num_seqs, is_fresh=is_fresh, way=way, tree=tree)
        return step if self._dealt is None else self._dealt.step(step, num_tokens // num_seqs)

    @torch.inference_mode()
    def warm_up(self, shapes: Sequence[GraphKey], progress: Progress | None = None) -> None:
        """Run inert steps of these shapes, so that no request waits for a kernel to be compiled."""
        for done, key in enumerate(shapes):
            if progress:
                progress("compiling kernels", done, len(shapes))
            trees = self._trees and 1 < key.q_len <= MAX_NODES
            layout = self._lay_out([], every_row=False, trees=trees)
            inputs = next(each for each in self._inputs if key.num_tokens <= each.max_num_tokens)
            inputs.load(layout, key.num_tokens, key.batch)
            for is_fresh in {False, key.q_len > SHORT}:
                step = self._even_step(inputs, key.num_tokens, key.batch, is_fresh=is_fresh)
                self._forward(inputs, step, key.num_tokens, inputs.logit_rows(1))
            if trees:
                tree = inputs.tree(key.num_tokens, key.batch)
                step = self._even_step(inputs, key.num_tokens, key.batch, tree=tree)
                self._forward(inputs, step, key.num_tokens, inputs.logit_rows(1), tree)
            if self._expands and key.q_len > SHORT and (key.batch == 1 or not self._fresh_prompts):
                self._warm_up_prompts(inputs, key)

    def _warm_up_prompts(self, inputs: StepInputs, key: GraphKey) -> None:
        """Prompts whose lengths are known: keys are expanded, of latent rows by groups of heads."""
        for context in (0, WARM_CONTEXT):
            step = self._even_step(inputs, key.num_tokens, key.batch, is_fresh=not context)
            room = step.entries[0].page_table.shape[1] * self.page_size
            lens = key.q_len, max(min(context, room - key.q_len), 0)
            step.host_lens = HostLens(*((each,) * key.batch for each in lens))
            self._forward(inputs, step, key.num_tokens, inputs.logit_rows(1))

    def _captured(self, num_tokens: int, num_seqs: int, key: GraphKey) -> torch.Tensor:
        inputs = self._inputs[0]
        tree = inputs.tree(num_tokens, num_seqs) if self._masks(key) else None
        step = self._even_step(inputs, num_tokens, num_seqs, way=key.way, tree=tree)
        return self._forward(inputs, step, num_tokens, 0, tree)

    def _graph_key(self, step: Sequence[Scheduled], way: DecodeWay) -> GraphKey | None:
        lengths = {run.num_tokens for run in step}
        if len(lengths) != 1 or any(run.scores_prompt or not run.samples for run in step):
            return None
        return fitting_key(self.graphs, lengths.pop(), len(step), way)

    def _prompt_key(self, step: Sequence[Scheduled]) -> PromptKey | None:
        """The smallest graph for a step of one prompt, of which one row is wanted at most."""
        if len(step) != 1 or step[0].num_drafts or step[0].scores_prompt:
            return None
        run = step[0]
        expands = run.start > 0 if self._fresh_prompts else self._expands and sees_many_keys(run)
        if run.num_tokens <= SHORT or expands:
            return None
        return self.prompt_graphs.fitting(lambda key: key.num_tokens >= run.num_tokens)
