"""The division of a call's work: tiles, the schedule, and the room in which parts wait."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.device import (
    has_boxes,
    has_fp8,
    has_overlap,
    has_tensor_memory,
    num_sms,
    shared_memory,
)
from anabranch.kernels.config import (
    AttendConfig,
    fit_shared_memory,
    is_main_tile,
    select_attend,
)
from anabranch.kernels.list_config import select_lists
from anabranch.kernels.load.arguments import box_keys
from anabranch.kernels.load.key_pairs import in_pairs
from anabranch.kernels.load.packed_codes import words_of
from anabranch.kernels.parts.slots import PartsLayout, lay_out_parts, num_slots
from anabranch.kernels.programs import (
    AttendProgram,
    HeadShape,
    PartKinds,
    StoreTypes,
    attend_program,
)
from anabranch.kernels.schedule.schedule import num_blocks_bound, schedule, schedule_size
from anabranch.kernels.triton.attend_lists import parts_of_list
from anabranch.kernels.versions import CODE_ROWS, PAIRS_IN_TENSOR_MEMORY

INVARIANT_PAIRS = 256  # of a middling batch, where tiles must not depend on the batch


TritonLayout = PartsLayout[AttendProgram]


def lay_out(call: AttendCall, options: PlanOptions) -> TritonLayout:
    """Select tiles, and room for a schedule and for parts."""
    keys, num_tokens = call.keys, call.queries.packed.shape[0]
    config = _select_short_lists(call, options)
    if config is not None:
        # there is a program for each part, whatever their number
        program = _program_of(call, config, PartKinds(uniform=True), num_programs=1)
        slots = keys.num_seqs * parts_of_list(keys.capacity, program.constants)
        return _lay_out(0, slots, program)
    program = _select_program(call, options)
    constants = program.constants
    slots = num_slots(keys, num_blocks_bound(keys.num_seqs, num_tokens, constants), constants)
    return _lay_out(schedule_size(keys.num_seqs, num_tokens, constants), slots, program)


def _lay_out(schedule_ints: int, slots: int, program: AttendProgram) -> TritonLayout:
    tiles = program.constants.tiles
    return lay_out_parts(
        program,
        schedule_ints=schedule_ints,
        slots=slots,
        rows=(slots, tiles.block_m),
        width=tiles.block_dv,
        num_counters=slots,
    )


def fill_plan(call: AttendCall, layout: TritonLayout, room: torch.Tensor) -> None:
    """Divide the work on the device."""
    plan = layout.open(room)
    if layout.program.constants.division.uniform:
        plan.parts.counters.zero_()
    else:
        schedule(plan.schedule, plan.parts.counters, call, plan.program.constants)


def _select_short_lists(call: AttendCall, options: PlanOptions) -> AttendConfig | None:
    """Tiles of lists that are attended to without a schedule; None for all other calls."""
    queries, keys, view = call.queries, call.keys, call.view
    if view.lists is None or not view.is_plain or keys.num_kv_heads != 1:
        return None
    if options.fused_merge is False:
        return None
    if options._replace(fused_merge=None, rows_per_seq=None) != PlanOptions():
        return None
    q = queries.packed
    per_program, per_sm = shared_memory(q.device)
    return select_lists(
        group=q.shape[1],
        num_lists=keys.num_seqs,
        width=keys.capacity,
        head_dim_k=keys.head_dim_k,
        head_dim_v=keys.head_dim_v,
        itemsize=q.element_size(),
        num_sms=num_sms(q.device),
        per_program=per_program,
        per_sm=per_sm,
    )


def _program_of(
    call: AttendCall, config: AttendConfig, parts: PartKinds, num_programs: int, **given: bool
) -> AttendProgram:
    """The program of a call in these tiles."""
    q, keys, view = call.queries.packed, call.keys, call.view
    group = q.shape[1] // keys.num_kv_heads
    is_cuda = q.is_cuda and not torch.version.hip
    return attend_program(
        config,
        HeadShape(group, keys.num_kv_heads, keys.head_dim_k, keys.head_dim_v),
        StoreTypes(
            keys.page_size,
            view.k.format,
            view.v.format,
            values_in_keys=view.values_in_keys,
            native_fp8=has_fp8(q.device),
            packed=is_cuda,
        ),
        parts,
        causal=call.rules.in_order,
        num_programs=num_programs,
        overlap=has_overlap(q.device),
        limit_registers=not torch.version.hip,  # AMD's compiler takes no limit
        **given,
    )


def _select_program(call: AttendCall, options: PlanOptions) -> AttendProgram:
    queries, keys, rules, view = call.queries, call.keys, call.rules, call.view
    q, num_kv_heads, head_dim_v = queries.packed, keys.num_kv_heads, keys.head_dim_v
    num_tokens, num_heads, head_dim_k = q.shape
    config = options.config
    latent, itemsize = view.values_in_keys, q.element_size()
    code_pairs = in_pairs(view, itemsize)
    code_pairs = code_pairs and (PAIRS_IN_TENSOR_MEMORY or not has_tensor_memory(q.device))
    if config is None:
        rows_per_seq = options.rows_per_seq
        if rows_per_seq is None:
            rows_per_seq = num_tokens * (num_heads // num_kv_heads) / max(keys.num_seqs, 1)
        config = select_attend(
            rows_per_seq=rows_per_seq,
            num_pairs=INVARIANT_PAIRS if options.batch_invariant else keys.num_seqs * num_kv_heads,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            itemsize=itemsize,
            window=rules.window,
            latent=latent,
            quantised=view.is_quantised,
            code_pairs=code_pairs,
            int8_codes=torch.int8 in (view.k.ptr.dtype, view.v.ptr.dtype),
            code_rows=16 if has_tensor_memory(q.device) else CODE_ROWS,
            box_keys=box_keys(view) if has_boxes(q.device) else 0,
            fused_merge=options.fused_merge,
        )
        per_program, per_sm = shared_memory(q.device)
        # Blackwell's compiler copies values that are columns of keys
        one_tile = latent and is_main_tile(head_dim_k, head_dim_v)
        one_tile = one_tile and not has_tensor_memory(q.device)
        config = fit_shared_memory(
            config,
            head_dim_k,
            0 if one_tile else head_dim_v,
            itemsize,
            per_program=per_program,
            per_sm=per_sm,
            code_words=all(words_of(view, itemsize)),
            code_pairs=code_pairs,
            folds_parts=options.batch_invariant,
        )
    if not isinstance(config, AttendConfig):
        raise ValueError(f"config must be an AttendConfig, got {type(config).__name__}")
    fused = config.fused_merge if options.fused_merge is None else options.fused_merge
    return _program_of(
        call,
        config,
        PartKinds(folded=options.batch_invariant, fused=fused),
        num_programs=num_sms(q.device) * config.workers_per_sm,
        leaves_empty=options.leave_empty,
    )
