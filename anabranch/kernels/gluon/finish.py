"""The end of an item: rows of a state, or of a part that waits for its merge."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from anabranch.kernels.gluon.operands import EndedRows
from anabranch.kernels.gluon.versions import store_box
from anabranch.kernels.parts.merge_items import is_row, place_rows, rows_of_slot
from anabranch.kernels.schedule.items import read_item, read_part
from anabranch.kernels.softmax.online_softmax import LN_2, LOG2_E, pivot_of


@gluon.jit
def finish_item(acc, total, peak, ticket, staging, given, C: gl.constexpr, WG: gl.constexpr):
    """Write the rows of an item that has ended: accumulators, sums, and peaks in base 2.

    The item is read again, so that the loop over tiles needs no registers for it.
    """
    item, pack = ticket // C.num_packs, ticket % C.num_packs
    block = read_item(given.order, item)
    part, num_parts, first_slot = 0, 1, 0
    if C.splits:
        part, num_parts, first_slot = read_part(given.order, item)
    ended = EndedRows(block, pack, part, num_parts, first_slot, 0)
    rows = block.first_row + WG * 64 + gl.arange(0, 64, total.type.layout)
    num_rows = block.q_len * C.pack
    sinks_ptr = given.rules.sinks
    pivot = pivot_of(peak)
    factor = gl.exp2(peak - pivot)  # 1, or 0 where nothing was seen
    if sinks_ptr is not None:
        # Orphan tokens belong to no sequence and have no sink.
        owned = is_row(rows, num_rows, C) & (part == 0)
        owned = owned & (block.q_start < gl.load(given.order + 2))
        head = pack * C.pack_heads + rows % C.pack
        sinks = gl.load(sinks_ptr + head, owned, other=-float("inf"))
        sinks = sinks.to(gl.float32)
        pivot = pivot_of(gl.maximum(peak, sinks * LOG2_E))
        factor = gl.exp2(peak - pivot)
        total = total * factor + gl.exp2(sinks * LOG2_E - pivot)
    lse = (pivot + gl.log2(total)) * LN_2
    if sinks_ptr is not None:  # (0, sink) where no key was seen, to the last bit
        lse = gl.where(peak == -float("inf"), sinks, lse)
    out = scaled_rows(acc, factor / gl.where(total == 0.0, 1.0, total), C)
    if (not C.splits) or num_parts == 1:
        write_out(out, lse, rows, num_rows, ended, staging, given.results, C, WG)
    elif block.first_row + WG * 64 < num_rows:
        leave_part(out, lse, rows, num_rows, ended, given.results.parts, C)


@gluon.jit
def scaled_rows(acc, factor, C: gl.constexpr):
    """The accumulator times one factor a row, as (main, rest) columns."""
    main, rest = acc
    layout: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    main = main * gl.convert_layout(factor, layout)[:, None]
    if C.dv_rest:
        layout_rest: gl.constexpr = gl.SliceLayout(1, rest.type.layout)
        rest = rest * gl.convert_layout(factor, layout_rest)[:, None]
    return main, rest


@gluon.jit
def leave_part(out, lse, rows, num_rows, ended, parts, C: gl.constexpr):
    """Write those rows of a part that belong to a token into its slot."""
    WIDTH: gl.constexpr = C.dv_main + C.dv_rest
    places = rows_of_slot(ended.part, rows - ended.block.first_row, ended, C)
    inside = is_row(rows, num_rows, C)
    gl.store(parts.lses + places, lse, inside)
    store_columns(out[0], parts.outs, places * WIDTH, inside)
    if C.dv_rest:
        store_columns(out[1], parts.outs, places * WIDTH + C.dv_main, inside)


@gluon.jit
def store_columns(out, ptr, starts, inside):
    """Write rows that begin at `starts`, those that are `inside`."""
    layout: gl.constexpr = out.type.layout
    starts = gl.convert_layout(starts, gl.SliceLayout(1, layout))[:, None]
    inside = gl.convert_layout(inside, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + starts + columns, out.to(ptr.dtype.element_ty), inside)


@gluon.jit
def write_out(out, lse, rows, num_rows, ended, staging, results, C: gl.constexpr, WG: gl.constexpr):
    """Write finished rows: by TMA where all 64 belong to the sequence, else one by one, since a
    box would write into the next sequence, or into heads of the next pack."""
    outs, lses = results.out, results.lse
    first_row = ended.block.first_row
    inside = is_row(rows, num_rows, C)
    tokens, heads = place_rows(rows, ended, C)
    gl.store(lses.ptr + tokens * lses.token + heads * lses.head, lse, inside)
    whole = first_row + WG * 64 + 64 <= num_rows
    if C.pack_heads != C.pack:
        whole = whole & False
    if whole:
        token = ended.block.q_start + (first_row + WG * 64) // C.pack
        head = ended.kv_head * C.pack_heads
        buffer, desc = staging.main.index(WG), staging.main_desc
        stage_columns(out[0], buffer, desc, token, head, 0, C, C.dv_main)
        if C.dv_rest:
            buffer, desc = staging.rest.index(WG), staging.rest_desc
            stage_columns(out[1], buffer, desc, token, head, C.dv_main, C, C.dv_rest)
    else:
        starts = tokens * outs.token + heads * outs.head
        store_columns(out[0], outs.ptr, starts, inside)
        if C.dv_rest:
            store_columns(out[1], outs.ptr, starts + C.dv_main, inside)


@gluon.jit
def stage_columns(out, buffer, desc, token, head, first, C: gl.constexpr, WIDTH: gl.constexpr):
    """Write columns by TMA, as many at a time as the staging buffer holds.

    Stores straight from registers cost 5% in a first version of the kernel.
    """
    if buffer.shape[1] == WIDTH:
        PACK: gl.constexpr = C.pack
        TOKENS: gl.constexpr = 64 // C.pack
        tma.store_wait(0)
        buffer.store(out.to(buffer.dtype))
        fence_async_shared()
        box = buffer.reshape((TOKENS, PACK, WIDTH))
        store_box(desc, [token, head, first], box)
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = gl.split(gl.permute(gl.reshape(out, [64, 2, HALF]), (0, 2, 1)))
        stage_columns(left, buffer, desc, token, head, first, C, HALF)
        stage_columns(right, buffer, desc, token, head, first + HALF, C, HALF)
