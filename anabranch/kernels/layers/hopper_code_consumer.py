"""The consumers of the Hopper kernel over codes: each widens and multiplies 64 outputs of a tile.

Codes come from shared memory as the matrix unit takes its left operand, become 16-bit numbers in
registers, and are multiplied from there. Half of a run is widened while the other is multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anabranch.kernels.gluon.barriers import bar_arrive
from anabranch.kernels.gluon.versions import thread_barrier
from anabranch.kernels.layers import hopper_code_config
from anabranch.kernels.layers.code_units import next_tile, owners, place_of
from anabranch.kernels.layers.hopper_code_copies import STAGE_FREE
from anabranch.kernels.layers.hopper_consumer import halves, store_layout, write_columns
from anabranch.kernels.layers.widen_codes import widen_codes

OUTPUTS = gl.constexpr(hopper_code_config.OUTPUTS)
WRITTEN = gl.constexpr(32)  # rows at a time: they go through shared memory


@gluon.constexpr_function
def sums_layout(rows):
    """Sums [64 outputs, rows] in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def load_words(codes, full, done, exists, C: gl.constexpr, WG: gl.constexpr):
    """Words of one run of this consumer's outputs, as the matrix unit takes its left operand."""
    layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(C.rows), 2)
    slot = done % C.stages
    mbarrier.wait(full.index(slot), (done // C.stages) & 1, pred=exists)
    return codes.index(slot).slice(WG * OUTPUTS, OUTPUTS, 0).load(layout)


@gluon.jit
def load_groups(weight, own, run, stride, C: gl.constexpr):
    """Scales and zeros of this consumer's outputs for a run of columns."""
    scales_ptr, zeros_ptr = weight
    ZERO: gl.constexpr = C.format.zero
    first = (run * C.format.run // C.format.group_k).to(gl.int64) * stride
    scales = gl.load(scales_ptr + first + own)
    if zeros_ptr is not None:
        return scales, gl.load(zeros_ptr + first + own)
    else:
        return scales, gl.full([OUTPUTS], ZERO, gl.float32, own.type.layout)


@gluon.jit
def multiply_pairs(numbers, scales):
    """Two products in one instruction, rounded as the dtype is."""
    if numbers.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, scales],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [numbers, scales],
            dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def multiply_by_both(numbers, scales, rests):
    """Products with the sum of two 16-bit numbers, rounded once but for the smaller of them."""
    if numbers.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 rest; mul.rn.bf16x2 rest, $1, $3; fma.rn.bf16x2 $0, $1, $2, rest; }",
            "=r,r,r,r", [numbers, scales, rests], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 rest; mul.rn.f16x2 rest, $1, $3; fma.rn.f16x2 $0, $1, $2, rest; }",
            "=r,r,r,r", [numbers, scales, rests], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def widen_half(words, groups, dtype: gl.constexpr, C: gl.constexpr, HALF: gl.constexpr):
    """Half of the parts of a run in 16 bits, times their scales where columns have groups."""
    FORMAT: gl.constexpr = C.format
    COUNT: gl.constexpr = C.format.parts // 2
    scales, zeros = groups
    parts = widen_codes(words, zeros.to(gl.float32)[:, None], dtype, FORMAT)
    numbers = ()
    for part in gl.static_range(HALF * COUNT, HALF * COUNT + COUNT):
        number = parts[part]
        if C.grouped:
            number = scaled(number, scales, C)
        numbers = numbers + (number,)  # noqa: RUF005 (no unpacking in kernels)
    return numbers


@gluon.jit
def scaled(numbers, scales, C: gl.constexpr):
    """Numbers times scales, in 16 bits."""
    rounded = scales.to(numbers.dtype)
    if C.split_scales:
        rests = (scales.to(gl.float32) - rounded.to(gl.float32)).to(numbers.dtype)
        return multiply_by_both(numbers, rounded[:, None], rests[:, None])
    else:
        return multiply_pairs(numbers, rounded[:, None])


@gluon.jit
def issue_half(numbers, rows, acc, C: gl.constexpr, HALF: gl.constexpr):
    """Add the product of half of a run to the sums, under way."""
    COUNT: gl.constexpr = C.format.parts // 2
    WORDS: gl.constexpr = C.format.words
    for part in gl.static_range(COUNT):
        columns = rows.slice((HALF * COUNT + part) * WORDS, WORDS, 1).permute((1, 0))
        acc = warpgroup_mma(numbers[part], columns, acc, is_async=True)
    return acc


@gluon.jit
def multiply_runs(
    operands, weight, own, stride, done, begin, count, C: gl.constexpr, WG: gl.constexpr
):
    """Sums [64 outputs, rows] over `count` runs from one on.

    The second half of a run is widened while the first is multiplied, and the first half of the
    next while the second is. Scales are on their way for two runs.
    """
    codes, x, full = operands
    ROWS: gl.constexpr = C.rows
    layout: gl.constexpr = sums_layout(ROWS)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    last = begin + count - 1
    groups = load_groups(weight, own, begin, stride, C)
    second, third = groups, groups
    if C.grouped:
        second = load_groups(weight, own, gl.minimum(begin + 1, last), stride, C)
        third = load_groups(weight, own, gl.minimum(begin + 2, last), stride, C)
    words = load_words(codes, full, done, True, C, WG)
    numbers = widen_half(words, groups, x.dtype, C, 0)
    for step in range(0, count):
        slot = (done + step) % C.stages
        acc = issue_half(numbers, x.index(slot), acc, C, 0)
        numbers = widen_half(words, groups, x.dtype, C, 1)
        acc = issue_half(numbers, x.index(slot), acc, C, 1)
        groups, second = second, third
        if C.grouped:
            third = load_groups(weight, own, gl.minimum(begin + step + 3, last), stride, C)
        words = load_words(codes, full, done + step + 1, step + 1 < count, C, WG)
        numbers = widen_half(words, groups, x.dtype, C, 0)
        acc = warpgroup_mma_wait(0, [acc])
        bar_arrive(STAGE_FREE + slot, C.threads)
    if not C.grouped:
        acc = acc * gl.convert_layout(groups[0].to(gl.float32), gl.SliceLayout(1, layout))[:, None]
    return acc


@gluon.jit
def join_sums(sums, sums_ptr, counters_ptr, first, last, C: gl.constexpr, WG: gl.constexpr):
    """Leave sums of some runs of a tile; (are all there, the sums of all its programs).

    The last to arrive adds them up in the order of programs.
    """
    layout: gl.constexpr = sums.type.layout
    SIZE: gl.constexpr = OUTPUTS * C.rows
    outputs = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))[:, None]
    places = outputs * C.rows + gl.arange(0, C.rows, gl.SliceLayout(0, layout))[None, :]
    own = place_of(gl.program_id(0), first) * C.consumers + WG
    gl.store(sums_ptr + own.to(gl.int64) * SIZE + places, sums)
    thread_barrier()  # every warp's stores come before the release below
    counter_ptr = counters_ptr + first * C.consumers + WG
    before = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = before == last - first
    if is_last:
        gl.store(counter_ptr, 0)
        sums = gl.zeros_like(sums)
        for program in range(first, last + 1):
            place = place_of(program, first) * C.consumers + WG
            part_ptr = sums_ptr + place.to(gl.int64) * SIZE
            sums += gl.load(part_ptr + places, cache_modifier=".cg")
    return is_last, sums


@gluon.jit
def write_rows(sums, bias, y_ptr, row, output, m, n):
    """Write sums [64 outputs, rows] from a row and an output on, some rows at a time.

    n is a multiple of 8.
    """
    if sums.shape[1] > WRITTEN:
        left, right = halves(sums)
        write_rows(left, bias, y_ptr, row, output, m, n)
        write_rows(right, bias, y_ptr, row + sums.shape[1] // 2, output, m, n)
    else:
        if bias is not None:
            sums += gl.convert_layout(bias, gl.SliceLayout(1, sums.type.layout))[:, None]
        rows = row + gl.arange(0, sums.shape[1], gl.SliceLayout(1, store_layout(OUTPUTS)))
        starts = rows.to(gl.int64) * (n // 8)
        write_columns(gl.permute(sums, (1, 0)), y_ptr, starts, rows < m, output, n)


@gluon.jit
def consume_units(operands, weight, written, shapes, work, C: gl.constexpr, WG: gl.constexpr):
    """Multiply one tile after another; the last program that shares a tile writes it."""
    bias_ptr, y_ptr, sums_ptr, counters_ptr = written
    stride, m, n = shapes
    unit, end, output_tile, row_tile, begin, num_units, num_runs, row_tiles = work
    own_layout: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, sums_layout(C.rows), 2))
    done = 0
    while unit < end:
        count = gl.minimum(num_runs - begin, end - unit)
        output = output_tile * C.outputs + WG * OUTPUTS
        own = gl.minimum(output + gl.arange(0, OUTPUTS, own_layout), n - 1)
        groups = own // C.format.group_n
        sums = multiply_runs(operands, weight, groups, stride, done, begin, count, C, WG)
        complete = True
        if count < num_runs:
            first, last = owners(unit - begin, num_runs, num_units, gl.num_programs(0))
            complete, sums = join_sums(sums, sums_ptr, counters_ptr, first, last, C, WG)
        if complete:
            bias = None
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + own).to(gl.float32)
            write_rows(sums, bias, y_ptr, row_tile * C.rows, output, m, n)
        done += count
        unit += count
        begin = 0
        output_tile, row_tile = next_tile(output_tile, row_tile, row_tiles)
