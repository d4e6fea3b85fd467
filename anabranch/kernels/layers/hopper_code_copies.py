"""Which units of work a program of the Hopper kernel over codes has, and the copies of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.gluon.barriers import bar_sync
from anabranch.kernels.gluon.versions import load_box

STAGE_FREE = gl.constexpr(8)  # to 15: named barriers; Triton takes those up to 6


@gluon.jit
def own_units(m, n, k, C: gl.constexpr):
    """What a program has of all units, which lie tile after tile, those of one output together.

    Its first unit and the end; the first one's tile of outputs, tile of rows and run; then how many
    units, runs of a tile and tiles of rows there are. Divisions take more registers than the
    producer has.
    """
    row_tiles = (m + C.rows - 1) // C.rows
    num_runs = (k + C.format.run - 1) // C.format.run
    num_units = (n + C.outputs - 1) // C.outputs * row_tiles * num_runs
    begin = gl.program_id(0) * num_units // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * num_units // gl.num_programs(0)
    tile = begin // num_runs
    return begin, end, tile // row_tiles, tile % row_tiles, begin - tile * num_runs, num_units, num_runs, row_tiles


@gluon.jit
def owner_of(unit, num_units):
    """The program that has a unit."""
    return ((unit + 1) * gl.num_programs(0) - 1) // num_units


@gluon.jit
def next_tile(output_tile, row_tile, row_tiles):
    """The tile after one."""
    row_tile += 1
    last = row_tile == row_tiles
    return gl.where(last, output_tile + 1, output_tile), gl.where(last, 0, row_tile)


@gluon.jit
def produce_units(operands, source, work, C: gl.constexpr):
    """Copy the codes and the rows of one unit after another."""
    codes, x, full = operands
    codes_desc, x_desc = source
    begin, end, output_tile, row_tile, run, _, num_runs, row_tiles = work
    for done in range(0, end - begin):
        slot = done % C.stages
        if done >= C.stages:
            bar_sync(STAGE_FREE + slot, C.threads)
        bar = full.index(slot)
        mbarrier.expect(bar, C.stage_bytes)
        words = [output_tile * C.outputs, run * C.format.words]
        load_box(codes_desc, words, bar, codes.index(slot))
        if C.overlap:
            if done == 0:  # codes are no kernel's output
                gdc_wait()
        load_box(x_desc, [row_tile * C.rows, run * C.format.run], bar, x.index(slot))
        run += 1
        if run == num_runs:
            run = 0
            output_tile, row_tile = next_tile(output_tile, row_tile, row_tiles)
