"""The producer of the Hopper kernel over codes: it copies the operands of units of work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.gluon.barriers import bar_sync
from anabranch.kernels.gluon.versions import load_box
from anabranch.kernels.layers.code_units import next_tile

STAGE_FREE = gl.constexpr(8)  # to 15: named barriers; Triton takes those up to 6


@gluon.jit
def copy_codes(desc, codes, full, slot, output_tile, run, C: gl.constexpr):
    """Announce a stage, and copy its codes."""
    bar = full.index(slot)
    mbarrier.expect(bar, C.stage_bytes)
    place = [output_tile * C.outputs, run * C.format.words]
    load_box(desc, place, bar, codes.index(slot))


@gluon.jit
def produce_units(operands, source, work, C: gl.constexpr):
    """Copy the codes and the rows of one unit after another.

    Codes are no kernel's output: as many as there is room for come before the wait for the kernel
    ahead.
    """
    codes, x, full = operands
    codes_desc, x_desc = source
    begin, end, output_tile, row_tile, run, _, num_runs, row_tiles = work
    first, first_row, first_run = output_tile, row_tile, run
    for slot in range(0, gl.minimum(end - begin, C.stages)):
        copy_codes(codes_desc, codes, full, slot, first, first_run, C)
        first_run += 1
        if first_run == num_runs:
            first_run = 0
            first, first_row = next_tile(first, first_row, row_tiles)
    if C.overlap:
        gdc_wait()
    for done in range(0, end - begin):
        slot = done % C.stages
        if done >= C.stages:
            bar_sync(STAGE_FREE + slot, C.threads)
            copy_codes(codes_desc, codes, full, slot, output_tile, run, C)
        row = row_tile * C.rows
        load_box(x_desc, [row, run * C.format.run], full.index(slot), x.index(slot))
        run += 1
        if run == num_runs:
            run = 0
            output_tile, row_tile = next_tile(output_tile, row_tile, row_tiles)
