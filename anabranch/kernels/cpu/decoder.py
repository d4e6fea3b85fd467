"""Decoder layers on a CPU in float32: one before and after its attention, or all in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from anabranch.kernels.cpu.native import native
from anabranch.kernels.cpu.pages import (
    NO_WINDOW,
    NewKeys,
    attention_sizes,
    check_status,
    find_keys,
    select_splits,
)
from anabranch.keys import PagedKV


class AttentionWeights(NamedTuple):
    """What comes before attention: a norm and joined projections."""

    norm: torch.Tensor  # [hidden]
    epsilon: float
    qkv: torch.Tensor  # the table of a packed weight, like o, gate_up and down
    bias: torch.Tensor | None
    head_norms: torch.Tensor | None  # [num_rotated, head_dim], by the same epsilon
    num_outputs: int  # of q, k and v
    num_rotated: int  # heads of q and k
    head_dim: int


class OutputWeights(NamedTuple):
    """What comes after attention: the output projection and the feed-forward block."""

    o: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor  # [hidden]
    epsilon: float
    gate_up: torch.Tensor
    down: torch.Tensor
    inner: int  # width of the feed-forward block


def layer_inputs(
    x: torch.Tensor,  # [rows, hidden], contiguous like all others
    cos: torch.Tensor,  # rows * head_dim numbers
    sin: torch.Tensor,
    weights: AttentionWeights,
) -> torch.Tensor:
    """q, k and v of every row, q and k normalised and rotated, [rows, heads, head_dim]."""
    rows = len(x)
    normed, joined = torch.empty_like(x), x.new_empty(rows, weights.num_outputs)
    native().layer_inputs(
        x.data_ptr(),
        weights.norm.data_ptr(),
        weights.qkv.data_ptr(),
        _address(weights.bias),
        _address(weights.head_norms),
        cos.data_ptr(),
        sin.data_ptr(),
        normed.data_ptr(),
        joined.data_ptr(),
        rows,
        weights.num_rotated,
        weights.head_dim,
        weights.epsilon,
        torch.get_num_threads(),
    )
    return joined.view(rows, -1, weights.head_dim)


def layer_outputs(
    x: torch.Tensor,  # [rows, hidden], contiguous like all others
    attended: torch.Tensor,  # [rows, heads of q * head_dim]
    weights: OutputWeights,
) -> torch.Tensor:
    """The output of the layer, [rows, hidden]."""
    rows, hidden = x.shape
    y = torch.empty_like(x)
    room = x.new_empty(rows * (2 * hidden + 3 * weights.inner))
    native().layer_outputs(
        x.data_ptr(),
        attended.data_ptr(),
        weights.o.data_ptr(),
        _address(weights.bias),
        weights.norm.data_ptr(),
        weights.gate_up.data_ptr(),
        weights.down.data_ptr(),
        room.data_ptr(),
        y.data_ptr(),
        rows,
        weights.epsilon,
        torch.get_num_threads(),
    )
    return y


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class RunLayer(NamedTuple):
    """A layer: its weights, and the constants of its attention."""

    before: AttentionWeights
    after: OutputWeights
    scale: float
    window: int | None


class PagedStep(NamedTuple):
    """What one step reads and writes: every layer's cache, by one page table."""

    keys: PagedKV  # of the first layer
    stores: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of all layers, as in `keys`
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    slot_mapping: torch.Tensor  # int64 [num_tokens], negative = not kept


class LayerRun:
    """The layers of a model as tables for the kernel, with the caches they were last run over."""

    def __init__(self, layers: Sequence[RunLayer]) -> None:
        self._layers = layers
        factors = [(each.before.epsilon, each.after.epsilon, each.scale) for each in layers]
        self._factors = torch.tensor(factors, dtype=torch.float32)
        self._table: torch.Tensor | None = None
        self._addresses: list[int] = []

    def __call__(
        self,
        x: torch.Tensor,  # [rows, hidden], contiguous
        cos: torch.Tensor,  # rows * head_dim numbers, contiguous
        sin: torch.Tensor,
        step: PagedStep,
    ) -> torch.Tensor:
        """The output of the last layer; new keys are written to the caches."""
        rows, hidden = x.shape
        before, after, *_ = self._layers[0]
        first, dim = find_keys(step.keys), before.head_dim
        y, heads = x.clone(), before.num_outputs // dim
        kv_heads = step.keys.num_kv_heads
        q_heads = heads - 2 * kv_heads
        splits = select_splits(first, step.cu_seqlens_q, q_heads)
        width = 4 * hidden + before.num_outputs + 3 * after.inner + splits * q_heads * (dim + 1)
        room = x.new_empty(rows * width)
        joined = room[: rows * before.num_outputs].view(rows, heads, dim)
        q, k, v = joined.split([q_heads, kv_heads, kv_heads], 1)
        new = NewKeys(k, v, step.slot_mapping)
        sizes = attention_sizes(q, first, new, splits, NO_WINDOW, causal=True)
        constants = (ctypes.c_int64 * len(sizes))(*sizes)
        arguments = (cos, sin, first.page_table, first.seq_lens, step.cu_seqlens_q, new[2])
        addresses = [each.data_ptr() for each in arguments] + [ctypes.addressof(constants)]
        status = native().run_layers(
            self._described(step.stores).data_ptr(),
            self._factors.data_ptr(),
            (ctypes.c_int64 * len(addresses))(*addresses),
            y.data_ptr(),
            room.data_ptr(),
            len(self._layers),
            rows,
            before.num_rotated,
            dim,
            torch.get_num_threads(),
        )
        check_status(status, q, first, step.cu_seqlens_q)
        return y

    def _described(self, stores: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        addresses = [each.data_ptr() for pair in stores for each in pair]
        if self._table is None or addresses != self._addresses:
            rows = [self._row(*pair) for pair in zip(self._layers, stores, strict=True)]
            self._table, self._addresses = torch.tensor(rows, dtype=torch.int64), addresses
        return self._table

    @staticmethod
    def _row(layer: RunLayer, store: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
        before, after, _, window = layer
        tensors = (before.qkv, after.o, after.gate_up, after.down)
        tensors += (before.bias, before.head_norms, after.bias, before.norm, after.norm, *store)
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        return [*addresses, NO_WINDOW if window is None else window]
