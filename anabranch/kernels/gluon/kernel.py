"""The Hopper kernel: shared memory, and one function for each role of its warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents

from anabranch.kernels.gluon.barriers import make_barriers, prefetch_maps
from anabranch.kernels.gluon.consumer import consume
from anabranch.kernels.gluon.copies import produce_queries_keys, produce_values
from anabranch.kernels.gluon.queue import make_queue


@gluon.jit
def allocate_rows(dtype: gl.constexpr, WIDTH: gl.constexpr):
    """Room for the 64 rows of each consumer."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [2, 64, WIDTH], layout)


@gluon.jit
def allocate_tiles(desc, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """A ring of tiles of keys or values."""
    return gl.allocate_shared_memory(desc.dtype, [STAGES, BLOCK_N, WIDTH], desc.layout)


@gluon.jit(do_not_specialize=["table_stride", "tree_width"])
def attend_kernel(
    q_main_desc, q_rest_desc, k_main_desc, k_rest_desc, v_main_desc, v_rest_desc,
    out_main_desc, out_rest_desc,
    k_place,  # rows of a page, columns of a head
    v_place,
    table_ptr,  # [num_seqs, max_pages] or None
    table_stride,
    rules,  # Rules, with the scale of logits in base 2
    tree_ptr,  # uint8 [num_tokens, tree_width] or None
    tree_width,
    sinks_ptr,  # [num_heads] or None
    out_rows,  # Rows [num_tokens, num_heads, head_dim_v]
    lse_rows,  # Rows [num_tokens, num_heads, 1]
    order_ptr,  # as order.py lays it out
    counter_ptr,  # 0 between launches
    parts,  # Parts
    C: gl.constexpr,  # HopperConstants
):  # fmt: skip
    """Attend to the items of `order_ptr`: two consumers of 64 rows each, two producers."""
    if C.overlap:  # global memory is not touched before `first_ticket`
        prefetch_maps(C)
        gdc_launch_dependents()  # the next kernel takes processors that have nothing left to do
    q_main = allocate_rows(q_main_desc.dtype, C.dk_main)
    k_main = allocate_tiles(k_main_desc, C.stages, C.block_n, C.dk_main)
    v_main = allocate_tiles(v_main_desc, C.stages, C.block_n, C.dv_main)
    out_main = allocate_rows(out_main_desc.dtype, C.out_columns)
    q_rest, k_rest, v_rest, out_rest = q_main, k_main, v_main, out_main
    if C.dk_rest:
        q_rest = allocate_rows(q_main_desc.dtype, C.dk_rest)
        k_rest = allocate_tiles(k_rest_desc, C.stages, C.block_n, C.dk_rest)
    if C.dv_rest:
        v_rest = allocate_tiles(v_rest_desc, C.stages, C.block_n, C.dv_rest)
        out_rest = allocate_rows(out_main_desc.dtype, C.dv_rest)
    bars = (
        make_barriers(2, 1), make_barriers(2, 1), make_barriers(C.stages, 1),
        make_barriers(C.stages, 1),
    )  # fmt: skip
    queue = make_queue()
    fence_async_shared()
    q, k, v = (q_main, q_rest), (k_main, k_rest), (v_main, v_rest)
    staging, out_desc = (out_main, out_rest), (out_main_desc, out_rest_desc)
    gl.warp_specialize(
        [
            (consume, (q, k, v, staging, bars, queue, out_desc, order_ptr, rules, tree_ptr,
                       tree_width, sinks_ptr, out_rows, lse_rows, parts, C, 0)),
            (consume, (q, k, v, staging, bars, queue, out_desc, order_ptr, rules, tree_ptr,
                       tree_width, sinks_ptr, out_rows, lse_rows, parts, C, 1)),
            (produce_queries_keys, (q, k, bars, queue, (q_main_desc, q_rest_desc),
                                    (k_main_desc, k_rest_desc), k_place, table_ptr, table_stride,
                                    counter_ptr, order_ptr, C)),
            (produce_values, (v, bars, queue, (v_main_desc, v_rest_desc), v_place, table_ptr,
                              table_stride, order_ptr, C)),
        ],
        [4, 1, 1],
        [C.consumer_registers, C.producer_registers, C.producer_registers],
    )  # fmt: skip
