"""PTX of Triton 3.9 keeps its meaning when operands of products on Hopper are rewritten."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from anabranch.launches import hopper_ptx
from anabranch.launches.hopper_ptx import (
    AS_WRITTEN,
    NO_COPIES,
    WHOLE_DESCRIPTORS,
    rewrite_ptx,
)

UPPER = 1 << 62
FIELD = "\tbfe.u32 \t%r1, %r0, 4, 14;\n"
SUM = "\tadd.s32 \t%r2, %r1, 6;\n"
DESCRIPTOR = f"\tcvt.u64.u32 \t%rd1, %r2;\n\tor.b64 \t%rd2, %rd1, {UPPER};\n"
PRODUCT = "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r7,%r8}, {%r5}, %rd2, 1;\n"
WHOLE = f"\tcvt.u64.u32 \t%rd1, %r1;\n\tadd.s64 \t%rd2, %rd1, {UPPER + 6};\n"


def rewritten(ptx: str, options: dict[str, str] = NO_COPIES) -> str:
    return rewrite_ptx(ptx, options["ptx_options"])


def test_a_sum_moves_into_its_descriptor() -> None:
    assert rewritten(FIELD + SUM + DESCRIPTOR, WHOLE_DESCRIPTORS) == FIELD + WHOLE
    masked = FIELD.replace("bfe.u32 \t%r1, %r0, 4, 14", "and.b32 \t%r1, %r0, 16383")
    assert rewritten(masked + SUM + DESCRIPTOR) == masked + WHOLE
    apart = SUM.replace("add.s32", "or.b32").replace(", 6;", ", 16384;")
    assert rewritten(FIELD + apart + DESCRIPTOR).endswith(f"%rd1, {UPPER + 16384};\n")


@pytest.mark.parametrize(
    "ptx",
    [
        FIELD.replace("bfe.u32 \t%r1, %r0, 4, 14", "mov.b32 \t%r1, %r0") + SUM + DESCRIPTOR,
        FIELD + FIELD.replace("4, 14", "5, 14") + SUM + DESCRIPTOR,  # of two values
        FIELD + "\tmov.b64 \t{%r1, %r9}, %rd9;\n" + SUM + DESCRIPTOR,
        FIELD + "\t@%p1 add.s32 \t%r1, %r1, 1;\n" + SUM + DESCRIPTOR,
        FIELD + SUM + DESCRIPTOR + "\tst.global.b32 \t[%rd9], %r2;\n",  # read elsewhere
        FIELD + SUM + DESCRIPTOR + "\tst.global.b64 \t[%rd9], %rd1;\n",
        FIELD + SUM.replace(", 6;", ", 4294967290;") + DESCRIPTOR,  # wraps
        FIELD + SUM.replace("add.s32", "or.b32") + DESCRIPTOR,  # bits that may be set already
        FIELD + SUM + DESCRIPTOR.replace(str(UPPER), str(UPPER + 2)),
    ],
)  # fmt: skip
def test_what_may_be_another_number_stays(ptx: str) -> None:
    assert rewritten(ptx) == ptx


def test_products_read_what_was_copied() -> None:
    copy = "\tmov.b32 %r5, %r4;\n"
    assert rewritten(copy + PRODUCT) == PRODUCT.replace("{%r5}", "{%r4}")
    assert rewritten(copy + PRODUCT, WHOLE_DESCRIPTORS) == copy + PRODUCT
    chain = "\tmov.b32 %r4, %r3;\n" + copy + PRODUCT
    assert rewritten(chain).startswith("\tmov.b32 %r4, %r3;\n\twgmma")
    assert "{%r4}" in rewritten(chain)


@pytest.mark.parametrize(
    "between",
    [
        "\tadd.s32 \t%r4, %r4, 1;\n",
        "\tadd.s32 \t%r5, %r5, 1;\n",
        "\t@%p1 mov.b32 \t%r4, %r9;\n",
        "\tmov.b64 \t{%r9, %r4}, %rd9;\n",
        "$L__BB0_1:\n",
        "\t@%p1 bra \t$L__BB0_1;\n",
        PRODUCT.replace("%r7,%r8", "%r4,%r8").replace("{%r5}", "{%r6}"),
    ],
)
def test_a_copy_whose_source_may_have_changed_stays(between: str) -> None:
    ptx = "\tmov.b32 %r5, %r4;\n" + between + PRODUCT
    assert rewritten(ptx) == ptx


def test_a_copy_that_is_read_elsewhere_stays() -> None:
    ptx = "\tmov.b32 %r5, %r4;\n" + PRODUCT + "\tst.global.b32 \t[%rd9], %r5;\n"
    assert rewritten(ptx) == ptx.replace("{%r5}", "{%r4}")


def test_only_kernels_for_hopper_that_ask_for_it_are_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    ptx = FIELD + SUM + DESCRIPTOR
    monkeypatch.setattr(compiler, "make_ptx", lambda *_: ptx)
    hopper_ptx.teach_compiler.__wrapped__()

    def made(options: str | None, capability: int) -> str:
        return compiler.make_ptx(None, "", {}, SimpleNamespace(ptx_options=options), capability)

    ours = WHOLE_DESCRIPTORS["ptx_options"]
    assert made(ours, 90) != ptx
    assert made(ours, 100) == made(None, 90) == made(AS_WRITTEN["ptx_options"], 90) == ptx
