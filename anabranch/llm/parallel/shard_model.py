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
from anabranch.llm.parallel.sharded_linear import GatheredLinear, SummedLinear, take_rows

GATHERED = ("colwise_gather_output", "colwise_rep")
TAKES_ALL = "rowwise_split_input"  # after a map whose outputs were gathered
NORMS = ("replicated_with_grad_allreduce",)  # of a head
EXPERTS = ("moe_tp_experts", "packed_colwise", "packed_rowwise")  # parameters, no linear maps
UNCUT = (*NORMS, *EXPERTS, "embedding_rowwise")
STYLES = ("colwise", "rowwise", TAKES_ALL, *GATHERED, *UNCUT)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
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
    attentions = {name: each for name, each in _modules(model) if _has_heads(name, each, plan)}
    count = _cut_attentions(attentions, ranks, whole)
    count += _cut_blocks(model, plan, attentions, ranks, whole)
    if not count:
        reasons = "; ".join(whole) or "its plan names no linear map"
        raise ValueError(
            f"no layer of {type(model).__name__} can be cut over {ranks.num_ranks} ranks: {reasons}"
        )
    if whole and not ranks.rank:
        log.warning("kept whole on each of %d ranks: %s", ranks.num_ranks, "; ".join(whole))
    return count + _cut_gathered(model, plan, ranks)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast("Any", model).named_modules())


def _pattern(name: str) -> str:
    """The name of a module as a plan spells it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _has_heads(name: str, module: nn.Module, plan: dict[str, str]) -> bool:
    """Whether a module is attention whose heads are independent, by its plan or without one."""
    if not all(isinstance(getattr(module, part, None), nn.Module) for part in PROJECTIONS):
        return False
    return plan.get(f"{_pattern(name)}.q_proj", "colwise") == "colwise"


def _cut_attentions(attentions: dict[str, nn.Module], ranks: RankGroup, whole: list[str]) -> int:
    count = 0
    for name, module in attentions.items():
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


def _cut_blocks(
    model: nn.Module,
    plan: dict[str, str],
    attentions: dict[str, nn.Module],
    ranks: RankGroup,
    whole: list[str],
) -> int:
    """Cut the maps of each block, such as gate, up and down, or none of them."""
    blocks: dict[str, list[tuple[str, nn.Linear, str]]] = {}
    for name, module in _modules(model):
        style = plan.get(_pattern(name))
        parent = name.rpartition(".")[0]
        if style not in ("colwise", "rowwise", TAKES_ALL) or parent in attentions:
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
            _replace(model, name, _cut(linear, style, ranks))
        count += len(linears)
    return count


def _cut(linear: nn.Linear, style: str, ranks: RankGroup) -> nn.Module:
    share = _share(_size(linear, style), ranks)
    if style == "colwise":
        return take_rows(linear, share)
    return SummedLinear(linear, share, ranks, takes_all=style == TAKES_ALL)


def _size(linear: nn.Linear, style: str) -> int:
    return linear.out_features if style == "colwise" else linear.in_features


def _sizes(name: str, linear: nn.Linear, style: str) -> str:
    what = "outputs" if style == "colwise" else "inputs"
    return f"{_pattern(name)} with {_size(linear, style)} {what}"


def _cut_gathered(model: nn.Module, plan: dict[str, str], ranks: RankGroup) -> int:
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
