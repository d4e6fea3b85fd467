"""The Hopper kernel for products of many rows with codes: its launch, and the roles of warps."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from anabranch.kernels import versions
from anabranch.kernels.gluon.barriers import make_barriers
from anabranch.kernels.layers import hopper_code_config
from anabranch.kernels.layers.code_units import own_units
from anabranch.kernels.layers.hopper_code_config import CodeTileConstants
from anabranch.kernels.layers.hopper_code_consumer import consume_units
from anabranch.kernels.layers.hopper_code_copies import produce_units
from anabranch.kernels.layers.quantised_product import CodeArguments
from anabranch.launches.recorder import launch

PRODUCER_REGISTERS = gl.constexpr(hopper_code_config.PRODUCER_REGISTERS)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.int16: gl.int16}


def hopper_codes(
    x: torch.Tensor,  # [m, k], contiguous rows, 16 bytes aligned
    weight: CodeArguments,
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [m, n], contiguous; n a multiple of 8
    sums: torch.Tensor,  # float32 [2 programs, 64 consumers * rows]
    counters: torch.Tensor,  # int32, 0: one a consumer
    constants: CodeTileConstants,
    num_programs: int,
) -> None:
    """Write x @ weight.T + bias into `y`."""
    (m, k), n, c = x.shape, y.shape[1], constants
    units = c.num_units(m, n, k)
    assert num_programs <= units < 2**31 // num_programs  # a tile waits for all its programs
    launch(
        hopper_codes_kernel,
        (num_programs,),
        _boxes(x, c.rows, c.format.run),
        _boxes(weight.words, c.outputs, c.format.words),
        (weight.scales, weight.zeros),
        bias,
        y,
        sums,
        counters,
        weight.scales.stride(0),
        m,
        n,
        k,
        c,
        num_warps=4,
        maxnreg=c.registers,
        hopper=versions.CODE_TILE_OPTIONS,
        **({"launch_pdl": True} if c.overlap else {}),
    )


def _boxes(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Boxes [rows, columns] of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


@gluon.jit(do_not_specialize=["scales_stride", "m", "n", "k"])
def hopper_codes_kernel(
    x_desc,  # [m, k]
    codes_desc,  # [n, runs * words of a run]
    weight,  # scales and zeros [column groups, row groups]; no zeros: taken from codes
    bias_ptr,  # [n] or None
    y_ptr,  # [m, n]
    sums_ptr,  # [2 programs, consumers, 64, rows]
    counters_ptr,  # [programs * consumers]
    scales_stride,
    m,
    n,
    k,
    C: gl.constexpr,  # CodeTileConstants
):
    """Multiply rows by codes: consumers of 64 outputs each, which share the rows; a producer."""
    if C.overlap:
        gdc_launch_dependents()
    x = gl.allocate_shared_memory(x_desc.dtype, [C.stages, C.rows, C.format.run], x_desc.layout)
    codes = gl.allocate_shared_memory(
        gl.int16, [C.stages, C.outputs, C.format.words], codes_desc.layout
    )
    full = make_barriers(C.stages, 1)
    fence_async_shared()
    operands = (codes, x, full)
    written = (bias_ptr, y_ptr, sums_ptr, counters_ptr)
    shapes = (scales_stride, m, n)
    work = own_units(gl.program_id(0), gl.num_programs(0), m, n, k, C)
    source = (codes_desc, x_desc)
    REGISTERS: gl.constexpr = C.consumer_registers
    if C.consumers == 2:
        gl.warp_specialize(
            [
                (consume_units, (operands, weight, written, shapes, work, C, 0)),
                (consume_units, (operands, weight, written, shapes, work, C, 1)),
                (produce_units, (operands, source, work, C)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume_units, (operands, weight, written, shapes, work, C, 0)),
                (consume_units, (operands, weight, written, shapes, work, C, 1)),
                (consume_units, (operands, weight, written, shapes, work, C, 2)),
                (consume_units, (operands, weight, written, shapes, work, C, 3)),
                (produce_units, (operands, source, work, C)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
