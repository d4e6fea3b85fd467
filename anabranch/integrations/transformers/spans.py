"""Masks as spans: which keys of a padded batch a causal layer may see, in two numbers a sequence.

Spans travel as a mask does, in 4 dimensions, and are known by their dtype: int32
[num_seqs, 1, window, 2], the window being a stride of 0. They hold the first key and the end, where
the queries end too. Without a sliding window, `window` is the number of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from transformers import masking_utils
from transformers.utils import import_utils

_masking = cast("Any", masking_utils)
_is_tracing = cast("Any", import_utils).is_tracing
_causal = _masking.causal_mask_function
_sliding = _masking.sliding_window_causal_mask_function(1)


def is_spans(mask: torch.Tensor) -> bool:
    """Whether a mask is one of ours; those of transformers are bool or float."""
    return (
        mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == 2
    )


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = _causal,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """Spans, None where all keys are new or all are seen, or else the whole mask in bool.

    The arguments are those of `sdpa_mask`. What tokens of the padding get is not defined. A padding
    mask is looked at on the host, at most twice.
    """
    traced = _is_tracing(attention_mask)
    window = None if traced else _window(mask_function, kv_length)
    end = q_offset + q_length - kv_offset
    whole = isinstance(end, int) and window is not None and end == kv_length <= window
    whole = whole and allow_is_causal_skip and q_length in (1, kv_length)
    if whole and (attention_mask is None or _sees_all(attention_mask, kv_length + kv_offset)):
        return None
    # Caches of fixed size forbid to skip the mask of a decode step; anyone else who does reads it.
    fixed = isinstance(end, torch.Tensor) or mask_function is not _causal
    skips = allow_is_causal_skip or (q_length == 1 and fixed)
    padding = None
    if window is not None and skips:
        padding = _find_padding(attention_mask, kv_length, kv_offset, end)
    if padding is None or window is None:
        return _masking.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            device=device,
            **options,
        )
    if whole and not padding.exists:
        return None
    spans = torch.empty(batch_size, 1, 1, 2, dtype=torch.int32, device=device)
    spans[:, 0, 0, 0] = padding.in_front
    spans[..., 1] = end
    return spans.expand(-1, -1, window, -1)


def _window(mask_function: Any, kv_length: int) -> int | None:
    """How many keys a token sees at most if this is a causal rule; None for rules unknown here."""
    if mask_function is _causal:
        return kv_length
    parts = _closed_over(mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not _causal:
        return None
    overlay = _closed_over(_sliding)["mask_functions"][0]
    same = getattr(parts[0], "__code__", None) is overlay.__code__
    return _closed_over(parts[0])["sliding_window"] if same else None


def _closed_over(function: Any) -> dict[str, Any]:
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _sees_all(attention_mask: torch.Tensor, num_keys: int) -> bool:
    """Whether there is no padding, which decides about most decode steps."""
    return attention_mask.shape[1] == num_keys and bool(attention_mask.all())


class _Padding(NamedTuple):
    exists: bool
    in_front: torch.Tensor | int  # of each sequence


def _find_padding(
    attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int, end: int | torch.Tensor
) -> _Padding | None:
    """The padding of keys before `end`; None if some sequence is not in one piece.

    Padding after a sequence does not matter: only padding sees it.
    """
    if isinstance(end, int) and end > kv_length:
        return None
    if attention_mask is None:
        return _Padding(False, 0)
    given: torch.Tensor = _masking.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    given = given[:, kv_offset : kv_offset + kv_length]
    columns = torch.arange(kv_length, device=given.device)
    begins = given & ~torch.cat([given.new_zeros(len(given), 1), given[:, :-1]], dim=1)
    exists = (~given & (columns < end)).any()
    broken = (begins.sum(-1) > 1).any() | (end + kv_offset > attention_mask.shape[1])
    flags: Any = torch.stack([exists, broken])
    exists, broken = flags.tolist()
    if broken:
        return None
    return _Padding(exists, (given.cumsum(-1) == 0).sum(-1).clamp_max(end))
