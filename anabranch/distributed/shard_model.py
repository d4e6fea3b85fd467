"""shard_model(): a transformers model cut over ranks by its own tensor-parallel plan.

The plan names the cut of each linear map. Attention keeps whole heads on a rank: query heads are
dealt out in order, kv heads with them, and a kv head is repeated where there are more ranks than kv
heads. Maps that no plan names stay whole on every rank, which is right, if not quicker.
"""

from __future__ import annotations

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


def shard_model(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Keep this rank's part of a model, in place; how many linear maps were cut.

    Call it on every rank with the same weights, before anything else changes the model. Refuses
    sizes that the ranks do not divide, and styles of a plan that are not known here.
    """
    ranks = find_group(group)
    plan = cast("dict[str, str]", getattr(model, "tp_plan", None) or {})
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has a tensor-parallel plan with {', '.join(unknown)}; "
            f"known are {', '.join(STYLES)}"
        )
    count = 0
    for name, module in _modules(model):
        if _is_attention(module):
            _cut_attention(name, module, ranks)
            count += len(PROJECTIONS)
    for name, module in _modules(model):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        parent = model.get_submodule(name.rpartition(".")[0])
        if style is None or style in UNCUT or _is_attention(parent):
            continue
        if type(module) is not nn.Linear:
            raise ValueError(f"{name} is to be cut {style}, but is a {type(module).__name__}")
        _replace(model, name, _cut(name, module, style, ranks))
        count += 1
    return count


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast("Any", model).named_modules())


def _is_attention(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def _cut(name: str, linear: nn.Linear, style: str, ranks: RankGroup) -> nn.Module:
    if style in GATHERED:
        return GatheredLinear(linear, ranks)
    if style == "rowwise":
        return SummedLinear(linear, _share(name, "inputs", linear.in_features, ranks), ranks)
    return take_rows(linear, _share(name, "outputs", linear.out_features, ranks))


def _share(name: str, what: str, size: int, ranks: RankGroup) -> slice:
    if size % ranks.num_ranks:
        raise ValueError(f"the {size} {what} of {name} cannot be cut over {ranks.num_ranks} ranks")
    share = size // ranks.num_ranks
    return slice(ranks.rank * share, (ranks.rank + 1) * share)


def _cut_attention(name: str, module: nn.Module, ranks: RankGroup) -> None:
    """Keep whole heads, with their kv heads and sinks."""
    attention = cast("Any", module)
    head_dim: int = attention.head_dim
    sizes = {part: getattr(attention, part).out_features for part in PROJECTIONS}
    num_heads, num_kv_heads = sizes["q_proj"] // head_dim, sizes["k_proj"] // head_dim
    heads = _share(name, "heads", num_heads, ranks)
    kv_heads = _kv_heads(name, num_kv_heads, ranks)
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


def _kv_heads(name: str, count: int, ranks: RankGroup) -> slice:
    """Those of this rank's query heads, which are consecutive."""
    if ranks.num_ranks % count and count % ranks.num_ranks:
        raise ValueError(
            f"the {count} kv heads of {name} can be neither cut nor repeated over "
            f"{ranks.num_ranks} ranks"
        )
    start = ranks.rank * count // ranks.num_ranks
    return slice(start, start + max(count // ranks.num_ranks, 1))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
