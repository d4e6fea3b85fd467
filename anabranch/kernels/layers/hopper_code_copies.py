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
