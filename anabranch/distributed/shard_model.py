"""shard_model(): a transformers model cut over ranks by its own tensor-parallel plan.

The plan names the cut of each linear map. Attention keeps whole heads on a rank: query heads are
dealt out in order, kv heads with them, and a kv head is repeated where there are more ranks than kv
heads. What the ranks do not divide, and maps that no plan names, stay whole on every rank: the
result is the same, only less is gained.
"""

from __future__ import annotations

import logging
import re
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from anabranch.distributed.rank_group import RankGroup, find_group
from anabranch.distributed.sharded_linear import GatheredLinear, SummedLinear, take_rows

GATHERED = ("colwise_gather_output", "colwise_rep")
UNCUT = ("replicated_with_grad_allreduce", "embedding_rowwise")  # norms of heads; a lookup
STYLES = ("colwise", "rowwise", *GATHERED, *UNCUT)
PROJECTIONS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
log = logging.getLogger("anabranch")


def shard_model(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Keep this rank's part of a model, in place; how many linear maps were cut.

    Call it on every rank with the same weights, before anything else changes the model. Refuses
    styles of a plan that are not known here, and models of which no layer can be cut.
    """
    ranks = find_group(group)
    plan = cast("dict[str, str]", getattr(model, "tp_plan", None) or {})
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has a tensor-parallel plan with {', '.join(unknown)}; "
            f"known are {', '.join(STYLES)}"
        )
    whole: list[str] = []
    count = _cut_attentions(model, ranks, whole)
    count += _cut_blocks(model, plan, ranks, whole)
    if not count:
        reasons = "; ".join(whole) or "its plan names no linear map"
        raise ValueError(
            f"no layer of {type(model).__name__} can be cut over {ranks.num_ranks} ranks: {reasons}"
        )
    if whole and not ranks.rank:
        log.warning("kept whole on each of %d ranks: %s", ranks.num_ranks, "; ".join(whole))
    return count + _cut_heads(model, plan, ranks)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast("Any", model).named_modules())


def _is_attention(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def _pattern(name: str) -> str:
    """The name of a module as a plan spells it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut_attentions(model: nn.Module, ranks: RankGroup, whole: list[str]) -> int:
    count = 0
    for name, module in _modules(model):
        if not _is_attention(module):
            continue
        attention = cast("Any", module)
        heads, kv_heads = (
            getattr(attention, part).out_features // attention.head_dim
            for part in ("q_proj", "k_proj")
        )
        if _heads_can_be_cut(heads, kv_heads, ranks.num_ranks):
            _cut_attention(attention, heads, kv_heads, ranks)
            count += len(PROJECTIONS)
        else:
            _note(whole, f"{_pattern(name)} with {heads} heads and {kv_heads} kv heads")
    return count


def _heads_can_be_cut(heads: int, kv_heads: int, num_ranks: int) -> bool:
    if heads % num_ranks:
        return False
    return not kv_heads % num_ranks or not num_ranks % kv_heads


def _cut_blocks(model: nn.Module, plan: dict[str, str], ranks: RankGroup, whole: list[str]) -> int:
    """Cut the maps of each block, such as gate, up and down, or none of them."""
    blocks: dict[str, list[tuple[str, nn.Linear, str]]] = {}
    for name, module in _modules(model):
        style = plan.get(_pattern(name))
        parent = name.rpartition(".")[0]
        if style not in ("colwise", "rowwise") or _is_attention(model.get_submodule(parent)):
            continue
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is to be cut {style}, but is a {type(module).__name__}")
        blocks.setdefault(parent, []).append((name, module, style))
    count = 0
    for linears in blocks.values():
        uneven = [_sizes(*each) for each in linears if _size(*each[1:]) % ranks.num_ranks]
        if uneven:
            _note(whole, uneven[0])
            continue
        for name, linear, style in linears:
            share = _share(_size(linear, style), ranks)
            rowwise = style == "rowwise"
            cut = SummedLinear(linear, share, ranks) if rowwise else take_rows(linear, share)
            _replace(model, name, cut)
        count += len(linears)
    return count


def _size(linear: nn.Linear, style: str) -> int:
    return linear.in_features if style == "rowwise" else linear.out_features


def _sizes(name: str, linear: nn.Linear, style: str) -> str:
    what = "inputs" if style == "rowwise" else "outputs"
    return f"{_pattern(name)} with {_size(linear, style)} {what}"


def _cut_heads(model: nn.Module, plan: dict[str, str], ranks: RankGroup) -> int:
    """Cut maps whose outputs are gathered, which padding makes possible for any size."""
    named = [(name, each) for name, each in _modules(model) if plan.get(_pattern(name)) in GATHERED]
    for name, module in named:
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is to be cut, but is a {type(module).__name__}")
        _replace(model, name, GatheredLinear(module, ranks))
    return len(named)


def _note(whole: list[str], reason: str) -> None:
    if reason not in whole:  # layers are alike
        whole.append(reason)


def _share(size: int, ranks: RankGroup) -> slice:
    share = size // ranks.num_ranks
    return slice(ranks.rank * share, (ranks.rank + 1) * share)


def _cut_attention(attention: Any, num_heads: int, num_kv_heads: int, ranks: RankGroup) -> None:
    """Keep whole heads, with their kv heads and sinks."""
    head_dim: int = attention.head_dim
    heads, kv_heads = _share(num_heads, ranks), _kv_heads(num_kv_heads, ranks)
    rows, kv_rows = (slice(x.start * head_dim, x.stop * head_dim) for x in (heads, kv_heads))
    attention.q_proj = take_rows(attention.q_proj, rows)
    attention.k_proj = take_rows(attention.k_proj, kv_rows)
    attention.v_proj = take_rows(attention.v_proj, kv_rows)
    attention.o_proj = SummedLinear(attention.o_proj, rows, ranks)
    if hasattr(attention, "num_key_value_groups"):
        num_own = kv_heads.stop - kv_heads.start
        attention.num_key_value_groups = (heads.stop - heads.start) // num_own
    if isinstance(getattr(attention, "sinks", None), nn.Parameter):
        sinks = attention.sinks.detach()[heads].clone()
        attention.sinks = nn.Parameter(sinks, requires_grad=False)


def _kv_heads(count: int, ranks: RankGroup) -> slice:
    """Those of this rank's query heads, which are consecutive."""
    start = ranks.rank * count // ranks.num_ranks
    return slice(start, start + max(count // ranks.num_ranks, 1))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
