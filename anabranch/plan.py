"""make_plan(): how the keys of a step are cut into parts, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from anabranch.kernels.config import (
    AttendConfig,
    AttendConstants,
    attend_constants,
    fit_shared_memory,
    select_attend,
)
from anabranch.keys import FLOATS, DenseKV, KeySource, PagedKV, RaggedKV
from anabranch.shapes import Sizes, check_device, check_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

INVARIANT_PAIRS = 256  # of a middling batch, where tiles must not depend on the batch
MAX_HEAD_DIM = 256
INTERPRETER_SMS = 3  # few, so that small tests have pairs that cross workers


@dataclass(frozen=True, slots=True)
class Plan:
    """A division of work, in device memory, and the room in which parts wait for their merge.

    It holds for every attend() with the same queries, lengths and masks: the layers of one step.
    Made inside a captured graph, it is made anew from the lengths at each replay.
    """

    schedule: torch.Tensor  # int32
    outs: torch.Tensor  # float32 [num_slots, block_m, block_dv]
    lses: torch.Tensor  # float32 [num_slots, block_m]
    counters: torch.Tensor  # int32 [num_slots], 0 between calls
    constants: AttendConstants
    num_warps: int
    num_stages: int
    max_registers: int | None
    num_tokens: int
    num_seqs: int
    packed: bool  # keys are a RaggedKV
    itemsize: int  # bytes of an element of q, k and v
    window: int | None

    def static(self) -> list[int]:
        """All that is not a tensor, as integers; `plan_from` reads them back."""
        sizes = (self.num_tokens, self.num_seqs, self.packed, self.itemsize, self.window or 0)
        tail = (self.num_warps, self.num_stages, self.max_registers or 0, *map(int, sizes))
        return [*map(int, astuple(self.constants)[:-2]), *tail]


def plan_from(tensors: Sequence[torch.Tensor], static: Sequence[int]) -> Plan:
    """A plan from what an operator's arguments can carry."""
    count = len(fields(AttendConstants)) - 2  # the strides of pages come with the keys
    num_warps, num_stages, max_registers, *sizes = static[count:]
    num_tokens, num_seqs, packed, itemsize, window = sizes
    schedule, outs, lses, counters = tensors
    return Plan(
        schedule,
        outs,
        lses,
        counters,
        AttendConstants(*static[:count]),  # pyright: ignore[reportArgumentType, reportCallIssue]
        num_warps,
        num_stages,
        max_registers or None,
        num_tokens,
        num_seqs,
        bool(packed),
        itemsize,
        window or None,
    )


def make_plan(
    q: torch.Tensor,
    keys: KeySource,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    fused_merge: bool = True,
    config: AttendConfig | None = None,
) -> Plan:
    """Divide the work of `attend(q, keys, ...)` with these options among the GPU's processors.

    Only the shape, dtype and device of `q` and `keys` matter, and the lengths, which are read on
    the device. With `batch_invariant`, keys are cut at fixed boundaries, so that a sequence's
    result has the same bits in any batch of the same query length. Without `fused_merge`, a second
    launch merges the parts, to see what that costs. `config` overrides the tiles.
    """
    check_masks(causal=causal, window=window, tree_mask=tree_mask)
    queries = pack_queries(q, keys, cu_seqlens_q)
    check_queries(queries.packed, keys)
    return plan_queries(
        queries,
        keys,
        causal=causal and tree_mask is None,
        window=window,
        fixed_parts=batch_invariant,
        fused=fused_merge,
        config=config,
    )


def plan_queries(
    queries: Queries,
    keys: KeySource,
    *,
    causal: bool,
    window: int | None,
    fixed_parts: bool = False,
    fused: bool = True,
    config: AttendConfig | None = None,
) -> Plan:
    """make_plan() for queries that are packed and checked."""
    q = queries.packed
    num_tokens, num_heads, head_dim_k = q.shape
    group = num_heads // keys.k.shape[-2]
    shape = (head_dim_k, keys.v.shape[-1], q.element_size())
    if config is None:
        config = select_attend(
            rows_per_seq=num_tokens * group / max(keys.num_seqs, 1),
            num_pairs=INVARIANT_PAIRS if fixed_parts else keys.num_seqs * keys.k.shape[-2],
            head_dim_k=shape[0],
            head_dim_v=shape[1],
            itemsize=shape[2],
            window=window,
        )
        per_program, per_sm = shared_memory(q.device)
        config = fit_shared_memory(config, *shape, per_program=per_program, per_sm=per_sm)
    constants = attend_constants(
        config,
        causal=causal,
        group=group,
        num_kv_heads=keys.k.shape[-2],
        page_size=keys.page_size if isinstance(keys, PagedKV) else 1,
        head_dim_k=head_dim_k,
        head_dim_v=keys.v.shape[-1],
        num_programs=num_sms(q.device) * config.workers_per_sm,
        fixed_parts=fixed_parts,
        fused=fused,
        overlap=has_overlap(q.device),
    )
    return _allocate(queries, keys, constants, config, window)


def _allocate(
    queries: Queries,
    keys: KeySource,
    constants: AttendConstants,
    config: AttendConfig,
    window: int | None,
) -> Plan:
    from anabranch.kernels.triton.runtime import interpreting
    from anabranch.kernels.triton.schedule_layout import num_blocks_bound, schedule_size

    num_tokens, num_seqs = queries.packed.shape[0], keys.num_seqs
    device = queries.packed.device
    planned = device.type != "cpu" or interpreting()  # the CPU's own path needs no division
    blocks = num_blocks_bound(num_seqs, num_tokens, constants)
    num_slots = _num_slots(keys, blocks, constants) if planned else 0
    size = schedule_size(num_seqs, num_tokens, constants) if planned else 0
    shape = (num_slots, constants.block_m)
    plan = Plan(
        schedule=torch.empty(size, dtype=torch.int32, device=device),
        outs=torch.empty((*shape, constants.block_dv), dtype=torch.float32, device=device),
        lses=torch.empty(shape, dtype=torch.float32, device=device),
        counters=torch.zeros(num_slots, dtype=torch.int32, device=device),
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=None if torch.version.hip else config.max_registers,  # AMD takes no limit
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        packed=isinstance(keys, RaggedKV),
        itemsize=queries.packed.element_size(),
        window=window,
    )
    if planned:
        _fill(plan, queries, keys)
    return plan


def _fill(plan: Plan, queries: Queries, keys: KeySource) -> None:
    from anabranch.kernels.triton import schedule

    schedule.schedule(
        plan.schedule,
        queries.starts(),
        None if isinstance(keys, RaggedKV) else keys.seq_lens,
        keys.cu_seqlens if isinstance(keys, RaggedKV) else None,
        max_keys(keys),
        plan.num_tokens,
        plan.window,
        plan.constants,
    )


def max_keys(keys: KeySource) -> int:
    """How many keys of one sequence the storage can hold."""
    if isinstance(keys, PagedKV):
        return keys.page_table.shape[1] * keys.page_size
    return keys.k.shape[1] if isinstance(keys, DenseKV) else keys.k.shape[0]


def _num_slots(keys: KeySource, blocks: int, constants: AttendConstants) -> int:
    """Two for each worker; with fixed parts, one for each unit there can be."""
    if not constants.fixed_parts:
        return 2 * constants.num_workers * constants.num_kv_heads
    part = constants.part_tiles * constants.block_n
    units = blocks * -(-max_keys(keys) // part)
    if isinstance(keys, RaggedKV):  # the storage bounds all sequences together
        per_seq = -(-constants.whole_rows // constants.block_m)
        units = min(units, blocks + per_seq * (keys.k.shape[0] // part + keys.num_seqs))
    return max(units, blocks) * constants.num_kv_heads


@cache
def num_sms(device: torch.device) -> int:
    """Processors of a GPU; a few for the interpreter on the CPU."""
    if device.type == "cpu":
        return INTERPRETER_SMS
    return _properties(device).multi_processor_count


@cache
def has_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one ahead ends: NVIDIA's GPUs since Hopper."""
    return device.type == "cuda" and not torch.version.hip and _properties(device).major >= 9


@cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that one program, and all programs of a processor, may use."""
    if device.type == "cpu":
        return 1 << 30, 1 << 30
    properties = _properties(device)
    usual = properties.shared_memory_per_block
    per_program = getattr(properties, "shared_memory_per_block_optin", 0) or usual
    return per_program, properties.shared_memory_per_multiprocessor


def _properties(device: torch.device) -> Any:
    return cast("Any", torch.cuda.get_device_properties)(device)  # pyright: ignore


def check_queries(q: torch.Tensor, keys: KeySource) -> Sizes:
    """Refuse packed queries that do not go with the keys."""
    sizes = Sizes()
    sizes.match("q", q, "num_tokens num_heads head_dim_k")
    check_dtype("q", q, FLOATS)
    check_dtype("k", keys.k, (q.dtype,))
    check_device("k", keys.k, q.device)
    sizes.bind("head_dim_k", keys.k.shape[-1], "k")
    num_kv_heads = keys.k.shape[-2]
    if not num_kv_heads or not sizes["num_heads"] or sizes["num_heads"] % num_kv_heads:
        raise ValueError(
            f"q has {sizes['num_heads']} heads, not a multiple of the {num_kv_heads} of the keys"
        )
    for name, tensor in (("q", q), ("k", keys.k), ("v", keys.v)):
        dim, stride = tensor.shape[-1], tensor.stride(-1)
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head dim from 1 to {MAX_HEAD_DIM}, got {dim}")
        if (dim - 1) * stride >= 1 << 31:
            raise ValueError(
                f"{name} spreads a head over 2^31 elements, its last stride is {stride}"
            )
    return sizes


def check_masks(*, causal: bool, window: int | None, tree_mask: torch.Tensor | None) -> None:
    """Refuse rules that contradict each other."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, a token's own key, got {window}")
    if tree_mask is not None and window is not None:
        raise ValueError(f"tree_mask has no order for a window to count in, got window={window}")
    if tree_mask is not None and not causal:
        raise ValueError("tree_mask replaces the causal rule among new tokens, got causal=False")


class Queries(NamedTuple):
    """Packed queries and where each sequence of them begins."""

    packed: torch.Tensor  # [num_tokens, num_heads, head_dim]
    cu_seqlens: torch.Tensor | None  # int32 [num_seqs + 1], or q_len tokens a sequence
    q_len: int
    num_seqs: int

    def starts(self) -> torch.Tensor:
        """cu_seqlens, made now if nobody gave it."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        steps = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=self.packed.device)
        return steps * self.q_len


def pack_queries(q: torch.Tensor, keys: KeySource, cu_seqlens_q: torch.Tensor | None) -> Queries:
    """Check how queries belong to sequences, and flatten padded ones."""
    if q.dim() not in (3, 4):
        raise ValueError(f"q must have 3 or 4 dimensions, got shape {tuple(q.shape)}")
    padded = q.dim() == 4
    packed = q.flatten(0, 1) if padded else q
    if cu_seqlens_q is None:
        if q.shape[0] != keys.num_seqs:
            raise ValueError(
                f"q has {q.shape[0]} sequences, the keys have {keys.num_seqs}; packed queries of "
                "other lengths than 1 need cu_seqlens_q"
            )
        return Queries(packed, None, q.shape[1] if padded else 1, keys.num_seqs)
    if padded:
        raise ValueError(
            f"cu_seqlens_q goes with packed queries of 3 dimensions, got q {tuple(q.shape)}"
        )
    check_dtype("cu_seqlens_q", cu_seqlens_q, (torch.int32,))
    check_device("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_q.shape != (keys.num_seqs + 1,):
        raise ValueError(
            f"cu_seqlens_q must be [{keys.num_seqs + 1}] for {keys.num_seqs} sequences of keys, "
            f"got shape {tuple(cu_seqlens_q.shape)}"
        )
    if cu_seqlens_q.shape[0] > 1 and cu_seqlens_q.stride(0) != 1:
        raise ValueError(f"cu_seqlens_q must be contiguous, got stride {cu_seqlens_q.stride(0)}")
    return Queries(packed, cu_seqlens_q, 0, keys.num_seqs)
