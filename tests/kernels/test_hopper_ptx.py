"""PTX of Triton 3.9 keeps its meaning when operands of products on Hopper are rewritten."""

from __future__ import annotations

import re
from random import Random
from types import SimpleNamespace

import pytest
import torch

from anabranch.launches import hopper_ptx
from anabranch.launches.hopper_ptx import (
    AS_WRITTEN,
    NO_COPIES,
    WHOLE_DESCRIPTORS,
    rewrite_ptx,
)

UPPER = 1 << 62
REGISTERS = 6  # of each kind, of a random program
NUMBERS = (0, 1, 6, 1030, 16383, 16384, 65535, 2**31 + 5, 2**32 - 10)
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
    nothing = masked.replace("16383", "0")
    assert rewritten(nothing + SUM + DESCRIPTOR) == nothing + WHOLE
    apart = SUM.replace("add.s32", "or.b32").replace(", 6;", ", 16384;")
    assert rewritten(FIELD + apart + DESCRIPTOR).endswith(f"%rd1, {UPPER + 16384};\n")


@pytest.mark.parametrize(
    "ptx",
    [
        FIELD.replace("bfe.u32 \t%r1, %r0, 4, 14", "mov.b32 \t%r1, %r0") + SUM + DESCRIPTOR,
        FIELD + FIELD.replace("4, 14", "5, 14") + SUM + DESCRIPTOR,  # of two values
        FIELD + "\tmov.b64 \t{%r1, %r9}, %rd9;\n" + SUM + DESCRIPTOR,
        FIELD + "\t@%p1 add.s32 \t%r1, %r1, 1;\n" + SUM + DESCRIPTOR,
        FIELD + "\telect.sync \t%r1|%p1, -1;\n" + SUM + DESCRIPTOR,
        FIELD + "\tactivemask.b32 \t%r1;\n" + SUM + DESCRIPTOR,
        FIELD + "\t{ .reg .b32 a; mov.u32 a, %tid.x; mov.b32 %r1, a; }\n" + SUM + DESCRIPTOR,
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
        "\tshfl.sync.idx.b32 \t%r4|%p1, %r9, 0, 31, -1;\n",
        "\t@first mov.b32 \t%r4, %r9;\n",
        "\t{ .reg .b32 a; add.s32 a, %r9, 1; mov.b32 %r4, a; }\n",
        "$L__BB0_1:\n",
        "\t@%p1 bra \t$L__BB0_1;\n",
        PRODUCT.replace("%r7,%r8", "%r4,%r8").replace("{%r5}", "{%r6}"),
    ],
)
def test_a_copy_whose_source_may_have_changed_stays(between: str) -> None:
    ptx = "\tmov.b32 %r5, %r4;\n" + between + PRODUCT
    assert rewritten(ptx) == ptx


def test_products_add_to_the_sums_they_had() -> None:
    ptx = "\tmov.b32 %r7, %r4;\n" + PRODUCT + "\tst.global.b32 \t[%rd9], %r7;\n"
    assert rewritten(ptx) == ptx


def test_a_copy_that_is_read_elsewhere_stays() -> None:
    ptx = "\tmov.b32 %r5, %r4;\n" + PRODUCT + "\tst.global.b32 \t[%rd9], %r5;\n"
    assert rewritten(ptx) == ptx.replace("{%r5}", "{%r4}")


class Program:
    """A random program of what is rewritten and what stands in its way, and what it computes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lines: list[str] = []
        for register in range(REGISTERS):
            self.lines.append(f"\tmov.b32 \t%r{register}, {self.random.choice(NUMBERS)};")
            self.lines.append(f"\tmov.b64 \t%rd{register}, {self.random.choice(NUMBERS)};")
        steps = self.copy, self.add, self.write, self.descriptor, self.product, self.store
        for step in self.random.choices(steps, k=40):
            step()
        self.store()

    def register(self) -> int:
        return self.random.randrange(REGISTERS)

    def copy(self) -> None:
        self.lines.append(f"\tmov.b32 %r{self.register()}, %r{self.register()};")

    def add(self) -> None:
        constant = self.random.choice(NUMBERS)
        self.lines.append(f"\tadd.s32 \t%r{self.register()}, %r{self.register()}, {constant};")

    def write(self) -> None:
        """In ways that leave less to see of what is written."""
        to, source = self.register(), self.register()
        self.lines.append(
            self.random.choice(
                [
                    f"\tshfl.sync.idx.b32 \t%r{to}|%p1, %r{source}, 0, 31, -1;",
                    f"\t@%p1 mov.b32 \t%r{to}, %r{source};",
                    f"\tmov.b64 \t{{%r{to}, %r{source}}}, %rd{self.register()};",
                    f"\t{{ .reg .b32 a; mov.b32 a, %r{source}; add.s32 %r{to}, a, 1; }}",
                ]
            )
        )

    def descriptor(self) -> None:
        """A field, a sum and their joining, of new registers or of others."""
        new, random = len(self.lines) + REGISTERS, self.random
        field = f"bfe.u32 \t%r{new}, %r{self.register()}, 4, 14;"
        masked = f"and.b32 \t%r{new}, %r{self.register()}, {random.choice(NUMBERS)};"
        read = random.choice([new, new, new, self.register()])
        operation, to = random.choice(["add.s32", "or.b32"]), random.choice([new, new, 0])
        self.lines += [
            "\t" + random.choice([field, masked]),
            f"\t{operation} \t%r{new + 1}, %r{read}, {random.choice(NUMBERS)};",
            f"\tcvt.u64.u32 \t%rd{new}, %r{new + 1};",
            f"\tor.b64 \t%rd{to}, %rd{new}, {random.choice([UPPER, UPPER + 2])};",
        ]
        if random.random() < 0.2:
            self.lines.append(f"\tst.global.b32 \t[%rd0], %r{new + 1};")

    def product(self) -> None:
        a, b, c, d = (self.register() for _ in range(4))
        pair = f"{{%r{a},%r{(a + 1) % REGISTERS}}}"
        self.lines.append(f"\twgmma.mma_async.sync.aligned {pair}, {{%r{b},%r{c}}}, %rd{d}, 1;")

    def store(self) -> None:
        for kind in ("r", "rd"):
            self.lines.append(f"\tst.global.b32 \t[%rd0], %{kind}{self.register()};")


def run(ptx: str) -> list[int]:
    """What a program stores."""
    values: dict[str, int] = {}
    stored: list[int] = []

    def value(operand: str) -> int:
        return values[operand] if operand.startswith("%") else int(operand)

    for line in ptx.replace("{ .reg .b32 a; mov.b32 a, ", "mov.b32 %a, ").split("\n"):
        for statement in line.replace(", a, 1; }", ", %a, 1;").split(";"):
            operation, _, rest = statement.strip().removeprefix("@%p1 ").partition(" ")
            given = [x for x in re.split(r"[\s,{}]+", rest.replace("|%p1", "")) if x]
            kind = operation.partition(".")[0]
            if kind == "st":
                stored.append(value(given[1]))
            elif kind == "wgmma":
                *sums, a, b, descriptor, _ = given
                read = value(a), value(b), value(descriptor)
                for register in sums:
                    values[register] = hash((value(register), *read)) % 2**32
            elif kind == "mov" and len(given) == 3:
                values[given[0]] = value(given[2]) % 2**32
                values[given[1]] = value(given[2]) >> 32
            elif kind in ("mov", "cvt", "shfl"):
                values[given[0]] = value(given[1])
            elif kind:
                wide = 2 ** (64 if operation.endswith("64") else 32)
                a, b = value(given[1]), value(given[2])
                done = {"add": a + b, "or": a | b, "and": a & b, "bfe": a >> 4 & 2**14 - 1}
                values[given[0]] = done[kind] % wide
    return stored


def test_random_programs_store_the_same() -> None:
    changed = 0
    for seed in range(300):
        ptx = "\n".join(Program(seed).lines)
        for options in (WHOLE_DESCRIPTORS, NO_COPIES):
            changed += (new := rewritten(ptx, options)) != ptx
            assert run(new) == run(ptx), ptx
    assert changed > 100


def test_kernels_are_for_the_current_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = ((9, 0), (8, 0), (10, 0))
    monkeypatch.setattr(hopper_ptx, "has_gpu", lambda: True)
    monkeypatch.setattr(hopper_ptx, "is_hopper", hopper_ptx.is_hopper.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    found: list[bool] = []
    for device in range(3):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        found.append(hopper_ptx.on_hopper())
    assert found == [torch.version.hip is None, False, False]


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
