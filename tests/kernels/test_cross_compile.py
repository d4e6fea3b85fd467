"""Every Triton kernel compiled for GPUs that are not here: registers, spills, shared memory."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from compile_cases import CASES
from compiled_launch import TARGETS, waits_first

import anabranch
from anabranch.kernels.versions import PAIRS_IN_TENSOR_MEMORY
from anabranch.launches.compile_ahead import compiling_ahead
from anabranch.launches.triton_version import TRITON

SAMPLED = int(os.environ.get("ANABRANCH_TEST_SAMPLE", "1")) > 1
KERNELS = Path(anabranch.__file__).parent / "kernels"
TESTS = Path(__file__).parents[1] / "support"
APPEND = "anabranch.kernels.triton.append_kv"
ATTEND = "anabranch.kernels.triton.attend"
CODE_EXPERTS = "anabranch.kernels.layers.quantised_experts"
EXPERTS = "anabranch.kernels.layers.expert_product"
HOPPER_CODES = "anabranch.kernels.layers.hopper_codes"
HOPPER_EXPERTS = "anabranch.kernels.layers.hopper_experts"
HOPPER = "anabranch.kernels.gluon.kernel"
LISTS = "anabranch.kernels.triton.attend_lists"
LATENT = "anabranch.kernels.gluon.latent_kernel"
ORDER = "anabranch.kernels.schedule.order"
MERGE = "anabranch.kernels.triton.merge"
MERGE_PARTS = "anabranch.kernels.parts.merge_parts"
QUANTISED = "anabranch.kernels.layers.quantised_product"
ROUTE = "anabranch.kernels.layers.route_experts"
ROWS = "anabranch.kernels.layers.quantised_rows"
SCALED = "anabranch.kernels.layers.scaled_product"
SCHEDULE = "anabranch.kernels.schedule.schedule"
# Cases that stand for all on other GPUs. Tiles are chosen for Hopper and later: elsewhere, decoding
# must compile and fit.
DECODE = [
    "decode 128/128 bfloat16, 8 rows, 1024 pairs",
    "decode 256/256 bfloat16, 32 rows, 1024 pairs",
    "decode with every rule and prior states",
    "decode latent, 16 rows",
    "decode latent q8_0",
    "decode fp8",
    "decode int8",
]
PREFILL = [
    "prefill 128/128 bfloat16, 32768 rows, 1024 pairs",
    "prefill 256/256 float32, 32768 rows, 1024 pairs",
    "prefill int8",
]
SOME = {
    (ATTEND, "sm_80"): [*DECODE, "decode q8_0", "decode latent, one sequence"],
    (ATTEND, "gfx942"): [*DECODE, "decode q8_0", "decode latent, one sequence"],
    (ATTEND, "sm_100"): [
        *(x for x in DECODE if PAIRS_IN_TENSOR_MEMORY or x not in ("decode fp8", "decode int8")),
        "decode fp8, keys one by one",
        "decode int8, keys one by one",
        *PREFILL,
        "decode latent, one sequence, values copied",
        "decode latent, boxes, values copied",
    ],
    **{
        (module, target): cases
        for target in ("sm_80", "sm_100", "gfx942")
        for module, cases in (
            (CODE_EXPERTS, ["16 rows, fp8 in blocks, gated", "16 rows, int4"]),
            (EXPERTS, ["16 x 32 gated"]),
            (QUANTISED, [f"32 rows, 128 outputs, 4 splits, {kind}" for kind in ("fp8", "int4")]),
            (ROWS, ["8 x 16, 16 runs, fp8", "16 x 32, 4 runs, int4"]),
            (ROUTE, ["1 tokens, 64 experts"]),
            (LISTS, ["group of 1, 128 bfloat16"]),
            (APPEND, ["bfloat16, 72/72", "bfloat16, by heads", "q8_0, latent", "fp8, float32"]),
            (
                MERGE,
                [
                    "two float16, head dim 72",
                    "two float16, head dim 128",
                    "eight float16",
                    "stacked float32 into float16",
                ],
            ),
        )
    },
}
# The cases of every kind of program, where fewer are asked for: the newest Triton in CI.
FEW = {
    (ATTEND, "sm_90"): [
        "decode 128/128 bfloat16, 8 rows, 1024 pairs",
        "decode 128/128 bfloat16, 8 rows, 64 pairs",
        "decode 256/256 bfloat16, 32 rows, 1024 pairs",
        "decode with every rule and prior states",
        "decode with fixed parts, 4 rows",
        "decode latent, 16 rows",
        "decode latent, boxes",
        "decode fp8_tensor",
        "decode fp8",
        "decode int8",
        "decode q8_0",
        "prefill 128/128 bfloat16, 32768 rows, 1024 pairs",
    ],
    (ATTEND, "sm_80"): DECODE[:1],
    (ATTEND, "gfx942"): DECODE[:1],
    (ATTEND, "sm_100"): [DECODE[0], "decode fp8, keys one by one", PREFILL[0]],
    (HOPPER, "sm_90"): ["128, pages and parts", "256", "64", "every rule"],
}
# Bytes that a thread may spill, by the beginning of a case's name; the last line that fits counts.
# Where nothing is said they are 0, and on the other GPUs attention may spill.
SPILLS = {
    (ATTEND, "sm_90"): {
        "prefill": 256,
        "prefill 256/256 bfloat16": 448,  # an accumulator of 128 x 256 leaves no registers
        "prefill with window": 512,
        "prefill with fixed parts": 512,  # the sums of parts before, outside of the loop
        "decode with fixed parts": 32,  # outside of the loop
        "decode latent": 16,
        # an accumulator of 64 x 512
        "decode latent, 64 rows": 640,
        "decode latent, boxes": 640,
        "decode latent, one sequence": 640,
        "decode latent q8_0": 256,
        "decode 16 rows of int8": 8,  # 168 registers, for three programs a processor
    },
    # Outside of the loop: at the ends of items, and in the producers, which have 24 registers
    (HOPPER, "sm_90"): {"": 128, "every rule": 512, "256": 512},
    (HOPPER_CODES, "sm_90"): {"256 rows": 24},  # the number of a thread, read once a tile
    (HOPPER_EXPERTS, "sm_90"): {"256 experts": 32},  # in the producer, once a tile
    (LATENT, "sm_90"): {"": 64},  # at the ends of items, and in the producer
    (ORDER, "sm_90"): {"": 16},
    # one program, once a step
    **{(SCHEDULE, x): {"packed, fixed parts, dealt out whole": 8} for x in ("sm_90", "sm_100")},
    **{(ATTEND, target): {"": 1 << 14} for target in ("sm_80", "sm_100", "gfx942")},
    # ptxas spills a little rather than take more than 72 registers
    **{(MERGE_PARTS, target): {"": 16} for target in ("sm_80", "sm_90", "sm_100")},
    (SCHEDULE, "sm_80"): {"packed, fixed parts": 8},
}
# Where more may be spilled since a version of Triton: later compilers keep fewer values of an item
# in registers (3.8: 24 bytes in a decode of 8 rows, 3.9: 48 over latent rows), and the loops over
# tiles are checked for keeping theirs.
MORE_SPILLS = {
    (3, 7): {
        (ATTEND, "sm_90"): {
            "decode": 48,
            "decode fp8": 64,
            "decode one sequence of int8": 56,
            "decode latent, 64 rows": 648,
        },
        (HOPPER_EXPERTS, "sm_90"): {"256 experts": 48},  # in the producer, once a tile
        # 512 threads have 128 registers each: one word is read again in a turn, of 534 instructions
        (ROWS, "sm_90"): {"16 x 16, 16 runs, int4": 8, "16 x 32, 4 runs, int4 gated": 8},
        (SCHEDULE, "sm_90"): {"packed": 8},  # before its loops
        (MERGE, "sm_100"): {"eight": 8},  # for 72 registers
    },
    (3, 8): {(HOPPER_CODES, "sm_90"): {"64 rows, 4 consumers": 24}},  # once a tile
    (3, 9): {
        (ATTEND, "sm_90"): {
            "decode latent, boxes": 704,
            "decode q8_0": 32,  # 128 registers, for four programs a processor
            "decode q8_0, 32 rows": 0,
        },
        (LISTS, "sm_100"): {"": 8},
        # before and after their loops
        (QUANTISED, "sm_90"): {"int8 in groups of 16 float zeros": 8},
        (ROWS, "sm_90"): {"8 x 16, 16 runs, int8": 16, "16 x 16, 8 runs, int4 in groups": 16},
    },
}
FEW_SPILLS = 64  # bytes up to which decoding must not spill in its loop over tiles
# Programs that share a processor, by the beginning of a case's name, and the memory they share.
TOGETHER = {
    (ATTEND, "sm_90"): {
        "decode with fixed parts": (2, 228 * 1024),
        "decode fp8": (2, 228 * 1024),
        "decode int8": (4, 228 * 1024),
    }
}
# The most shared memory of a case, by the beginning of its name: codes become halves in registers,
# and would need more if these went through shared memory once more.
SHARED = {(ATTEND, "sm_90"): {"decode fp8": 72 * 1024, "decode int8": 40 * 1024}}
# Tiles that are never selected there: Hopper loads codes by pairs of keys, and values that are
# columns of keys with these.
UNUSED = {
    (ATTEND, "sm_90"): [
        "decode fp8, keys one by one",
        "decode int8, keys one by one",
        "decode latent, 64 rows, values copied",
        "decode latent, one sequence, values copied",
        "decode latent, boxes, values copied",
    ]
}
# Kernels that are launched while the one ahead ends, on GPUs that can.
OVERLAPPED = {
    (kernel, target)
    for kernel in (
        "attend_kernel",
        "attend_latent_kernel",
        "attend_lists_kernel",
        "gate_row_kernel",
        "latent_inputs_kernel",
        "merge_parts_kernel",
        "project_row_kernel",
    )
    for target in ("sm_90", "sm_100")
}
# The widths, in bytes, of all global loads of a case: values 16, LSEs 4.
LOADS = {
    MERGE: {
        "two float16, head dim 128": {16, 4},
        "stacked float32 into float16": {16, 4},
    }
}


def functions_in(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


# Module, and the device entry points that its cases must launch.
MODULES = {
    f"anabranch.kernels.{path.parent.name}.{path.stem}": kernels
    for path in sorted(KERNELS.glob("*/*.py"))
    if path.parent.name != "cpu"
    and (kernels := {name for name in functions_in(path) if name.endswith("_kernel")})
}
HOPPER_ONLY = {HOPPER, HOPPER_CODES, HOPPER_EXPERTS, LATENT, ORDER, SCALED}


def compiled_for(module: str, target: str) -> bool:
    """Whether a module's kernels are checked on a GPU; if fewer are asked for, mostly on Hopper."""
    if target == "sm_90":
        return True
    return module not in HOPPER_ONLY and (not SAMPLED or module in (ATTEND, LISTS, MERGE))


class Compiler:
    """A process of its own: under the interpreter, kernels are no kernels."""

    def __init__(self, cache: Path) -> None:
        root = str(KERNELS.parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = dict(os.environ, TRITON_CACHE_DIR=str(cache), PYTHONPATH=path)
        environment.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "compile_cases.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def cases(self, module: str, target: str) -> list[dict[str, Any]]:
        assert self.process.stdin and self.process.stdout
        some = FEW if SAMPLED and (module, target) in FEW else SOME
        named, unused = (table.get((module, target), []) for table in (some, UNUSED))
        line = json.dumps([module, target, named, unused])
        print(line, file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        assert isinstance(answer, list), answer
        return answer


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    started = Compiler(tmp_path_factory.mktemp("compiled"))
    yield started
    with started.process as process:
        process.kill()


def allowed_spills(module: str, target: str, case: str) -> int:
    tables = [SPILLS, *(table for first, table in MORE_SPILLS.items() if first <= TRITON)]
    rows = [table.get((module, target), {}).items() for table in tables]
    fitting = ([0, *(most for begin, most in row if case.startswith(begin))] for row in rows)
    return max(each[-1] for each in fitting)


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("module", "target"),
    [
        (module, target)
        for module in sorted(MODULES)
        for target in TARGETS
        if compiled_for(module, target)
    ],
)
def test_kernels_fit(module: str, target: str, compiler: Compiler) -> None:
    limits, cases = TARGETS[target], compiler.cases(module, target)
    assert {case["kernel"] for case in cases} == MODULES[module]
    for case in cases:
        allowed = allowed_spills(module, target, case["case"])
        assert case["spills"] <= allowed, case
        if case["case"].startswith("decode") and allowed <= FEW_SPILLS:
            assert case.get("tiles_stay_in_registers", True), case
        assert 0 < case["registers"] <= limits.registers, case
        assert case["shared_bytes"] <= limits.shared_bytes, case
        for begin, most in SHARED.get((module, target), {}).items():
            assert not case["case"].startswith(begin) or case["shared_bytes"] <= most, case
        for begin, (programs, room) in TOGETHER.get((module, target), {}).items():
            if case["case"].startswith(begin):  # the driver takes 1 KiB of each
                assert programs * (case["shared_bytes"] + 1024) <= room, case
                assert programs * 128 * case["registers"] <= 1 << 16, case
        if (case["kernel"], target) in OVERLAPPED:
            assert case["waits"], f"{case['case']} reads before the kernel ahead has ended"
        assert not case.get("serialised"), case
        assert case.get("waits_after_exponentials", True), case
        assert case.get("loops_join_no_halves", True), case
        assert case.get("products_follow_each_other", True), case
        assert case.get("loops_stay_in_registers", True), case
        assert case.get("loops_overlap_products", True), case
        assert case.get("prefetches_every_map", True), case
    widths = {case["case"]: set(case["load_bytes"]) for case in cases}
    for name, expected in LOADS.get(module, {}).items():
        assert widths[name] == expected, name


WAIT, LOAD, RELEASE = (
    "griddepcontrol.wait;\n",
    "@%p2 ld.global.b32 %r2, [%rd1];\n",
    "barrier.sync 1;\n",
)


@pytest.mark.parametrize(
    ("default", "worker", "waits"),
    [
        (WAIT + RELEASE + LOAD, LOAD, True),
        (RELEASE + WAIT + LOAD, WAIT + LOAD, True),
        (RELEASE + WAIT + LOAD, "", True),
        (RELEASE, "", False),
        (RELEASE + WAIT + LOAD, LOAD, False),
        (RELEASE + WAIT + LOAD, LOAD + WAIT, False),
        (RELEASE + WAIT + LOAD, "cp.async.bulk.commit_group;\n", False),
        (RELEASE + WAIT + LOAD, f"@%p3 bra $L__BB0_4;\n{WAIT}$L__BB0_4:\n{LOAD}", False),
        (RELEASE + LOAD, WAIT + LOAD, False),
        (LOAD + WAIT + RELEASE, WAIT + LOAD, False),
        (f"@%p3 bra $L__BB0_4;\n{WAIT}$L__BB0_4:\n{RELEASE}{LOAD}", "", False),
    ],
)
def test_every_partition_waits(default: str, worker: str, waits: bool) -> None:
    ptx = f"""
    .visible .entry some_kernel(
    @%p1 bra $L__BB0_2;
    bra.uni $L__BB0_1;
    $L__BB0_2:  // the default partition
    {default}
    ret;
    $L__BB0_1:  // the workers
    {RELEASE}
    $L_brx_0: .branchtargets
        $L__BB0_3,
        $L__BB0_5;
    brx.idx %r1, $L_brx_0;
    $L__BB0_3:
    {worker}
    bra.uni $L__BB0_1;
    $L__BB0_5:
    ret;
    """
    assert waits_first(ptx) == waits


def test_every_kernel_module_has_cases() -> None:
    assert set(MODULES) == set(CASES)


def test_a_compilation_ahead_that_fails_leaves_nothing_behind() -> None:
    from triton.runtime._async_compile import active_mode

    def fail() -> None:
        raise RuntimeError("ptxas")

    with compiling_ahead():
        mode = active_mode.get()
        assert mode is not None
        ends = len(signature(mode.submit).parameters) - 2  # one of them until Triton 3.8
        mode.submit("key", fail, *[lambda _: None] * ends)
    assert active_mode.get() is None
