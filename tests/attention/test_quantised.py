"""Quantised stores: what a format loses, its codes bit for bit, and attention over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import FP8_SCALE, Case, assert_right, make_inputs

from anabranch import (
    AttentionState,
    LatentKV,
    PagedKV,
    append_kv,
    attend,
    make_plan,
    reference,
)
from anabranch.kernels.config import AttendConfig
from anabranch.kernels.cpu.append_kv import encode_rows, encodes_rows
from anabranch.kernels.cpu.native import native
from anabranch.kernels.load.key_pairs import in_pairs
from anabranch.kernels.load.packed_codes import in_words
from anabranch.keys.formats import BLOCK, E4M3, FORMATS, decode, empty_store, encode, encoded_store

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU here")
DEVICES = [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=GPU)]
every_implementation = pytest.mark.parametrize(
    ("impl", "device"),
    [("torch", "cpu"), *(pytest.param("triton", *x.values, marks=x.marks) for x in DEVICES)],
)
QUANTISED = [name for name in FORMATS if name != "plain"]
PAIRS = [
    *((name, name) for name in QUANTISED),
    ("q8_0", "fp8"),
    ("plain", "int8"),
    ("fp8", "plain"),
]
MIXED = {"q_lens": (1, 8, 0, 3, 2), "k_lens": (70, 33, 5, 1, 0)}
PAGED = Case(dims=(64, 64), group=4, padding=1, **MIXED)
LATENT = replace(PAGED, source="latent", num_kv_heads=1, dims=(96, 64), group=16)
FEW_ROWS = AttendConfig(16, 32, 4, 2, 2, keys_first=True)
MANY_ROWS = AttendConfig(64, 16, 4, 2, 1, merge_rows=4, values_first=True)


def check(case: Case, impl: str, config: AttendConfig | None = None) -> None:
    q, keys, options = make_inputs(case, 0)
    plan = None
    if config is not None:
        names = ("cu_seqlens_q", "causal", "window", "tree_mask")
        given = {name: options[name] for name in names}
        plan = make_plan(q, keys, impl=impl, config=config, **given)
    state = attend(q, keys, plan=plan, impl=impl, check=True, **options)
    assert_right(state, q, keys, options)


@every_implementation
@pytest.mark.parametrize("formats", PAIRS, ids="/".join)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_paged(formats: tuple[str, str], dtype: torch.dtype, impl: str, device: str) -> None:
    check(replace(PAGED, formats=formats, dtype=dtype, device=device), impl)


@every_implementation
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_latent(name: str, dtype: torch.dtype, impl: str, device: str) -> None:
    check(replace(LATENT, formats=(name, name), dtype=dtype, device=device), impl)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("config", [FEW_ROWS, MANY_ROWS], ids=["few rows", "many rows"])
@pytest.mark.parametrize("case", [PAGED, LATENT], ids=["paged", "latent"])
def test_tiles(case: Case, config: AttendConfig, name: str, device: str) -> None:
    dtype = SINGLE if config is MANY_ROWS else HALF
    lengths = {"q_lens": (1, 3), "k_lens": (90, 35)}
    case = replace(case, formats=(name, name), dtype=dtype, device=device, **lengths)
    check(replace(case, softcap=5.0), "triton", config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("page_size", [8, 64], ids="pages of {}".format)
def test_words(page_size: int, name: str, device: str) -> None:
    """Codes loaded four at a time, from tiles of several pages and tiles inside of one."""
    lengths = {"q_lens": (1, 2, 1, 0), "k_lens": (70, 33, 1, 64)}
    case = replace(PAGED, dims=(128, 128), num_kv_heads=1, dtype=HALF, **lengths)
    case = replace(case, formats=(name, name), page_size=page_size, device=device)
    _, keys, _ = make_inputs(case, 0)
    assert in_words(keys.view().k)
    assert in_pairs(keys.view()) == (name != "q8_0")
    check(case, "triton", FEW_ROWS)
    check(case, "triton", replace(FEW_ROWS, block_m=8, block_n=64))
    case = replace(case, window=20, softcap=5.0 if page_size == 8 else None)
    check(case, "triton", replace(FEW_ROWS, keys_first=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp8", "int8", "q8_0"])
def test_scales_of_any_strides(name: str, device: str) -> None:
    """Heads first as `empty_store` lays them out, keys first, and in pages of their own."""
    lengths = {"q_lens": (1, 2, 1), "k_lens": (70, 33, 1)}
    case = replace(PAGED, dims=(128, 128), num_kv_heads=2, dtype=HALF, padding=0, **lengths)
    case = replace(case, formats=(name, name), device=device)
    q, keys, options = make_inputs(case, 0)
    num_pages, page_size, _, *blocks = keys.k_scales.shape
    width = blocks[0] if blocks else 1
    strides = (page_size * width, width, num_pages * page_size * width)
    assert keys.k_scales.stride()[:3] == strides
    config = replace(FEW_ROWS, block_m=8, block_n=64)
    names = ("cu_seqlens_q", "causal", "window", "tree_mask")
    given = {name: options[name] for name in names}
    new = [x.to(HALF) for x in keys.gather(0)]
    table = keys.page_table[0, : -(-70 // page_size)].long()
    slots = (table[:, None] * page_size + torch.arange(page_size, device=device)).flatten()[:70]
    written = []
    for order in (torch.clone, torch.Tensor.contiguous, by_pages):
        scales = {name: order(getattr(keys, name)) for name in ("k_scales", "v_scales")}
        other = replace(keys, **scales)
        append_kv(other, *new, slots, impl="triton")
        plan = make_plan(q, other, impl="triton", config=config, **given)
        assert_right(attend(q, other, plan=plan, impl="triton", **options), q, other, options)
        written.append(other.k_scales.nan_to_num())
    assert torch.equal(written[0], written[1]) and torch.equal(written[0], written[2])


def by_pages(scales: torch.Tensor) -> torch.Tensor:
    return scales.transpose(1, 2).contiguous().transpose(1, 2)


def test_codes_that_are_not_in_words() -> None:
    codes = torch.zeros(4, 8, 2, 128, dtype=torch.int8)
    scales = torch.ones(4, 8, 2)
    assert in_words(encoded_store("k", codes, scales))
    for other in (codes[..., :96], codes[..., 8:72], codes.mT.contiguous().mT, codes[..., :32]):
        assert not in_words(encoded_store("k", other, scales))
    assert not in_words(encoded_store("k", codes.float(), None))


def test_codes_that_are_not_in_pairs() -> None:
    case = replace(PAGED, formats=("int8", "int8"), dims=(128, 128), dtype=HALF)
    assert in_pairs(make_inputs(case, 0)[1].view())
    changes = ({"page_size": 7}, {"dims": (64, 128)}, {"dims": (128, 256)})
    changes += ({"formats": ("int8", "plain")}, {"formats": ("q8_0", "fp8")})
    for change in changes:
        assert not in_pairs(make_inputs(replace(case, **change), 0)[1].view())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_queries_beyond_float16(dims: tuple[int, int], name: str, device: str) -> None:
    """Tiles of words are float16, and so are queries: each row of them in a unit of its own."""
    case = replace(PAGED, formats=(name, name), dtype=BRAIN, device=device, q_lens=(1,) * 5)
    case = replace(case, dims=dims, padding=0)
    q, keys, options = make_inputs(case, 0)
    sizes = torch.tensor([1e18, 1e-18, 1.0, 1e6, 0.0], device=device)[:, None, None]
    for scale in (1e-18, 1.0, 1e18):
        options["scale"] = scale
        # Logits of more than about 2^24 have no digits left after the largest is subtracted.
        rows = (q * sizes.clamp(max=1e3 / scale)).to(BRAIN)
        assert_right(attend(rows, keys, impl="triton", **options), rows, keys, options)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_beyond_float16_saturate_where_they_are_read(device: str) -> None:
    """The store keeps ggml's numbers; a tile of them has scales of at most 511."""
    none = torch.zeros(1, dtype=torch.int32, device=device)
    k, scales = empty_store("q8_0", (1, 8, 1, 64), BRAIN, torch.device(device))
    v, v_scales = k.clone(), scales.clone()
    keys = PagedKV(k, v, none[:, None], none + 1, scales, v_scales, BRAIN)
    rows = torch.full((1, 1, 64), 1e5, dtype=BRAIN, device=device)
    rows[..., 32:] = -3.0
    append_kv(keys, rows, rows, none.long())
    assert v_scales[0, 0, 0, 0] > 511
    out = attend(rows * 1e-9, keys, impl="triton").out.float().cpu()
    assert ((out[0, 0, :32] - 511 * 127).abs() <= 256).all()  # a step of bfloat16
    assert torch.equal(out[0, 0, 32:], rows[0, 0, 32:].float().cpu())


@GPU
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_bfloat16(dims: tuple[int, int], name: str) -> None:
    case = replace(PAGED, formats=(name, name), dtype=BRAIN, device="cuda", page_size=16, dims=dims)
    check(case, "triton")
    check(replace(case, q_lens=(300, 1, 77), k_lens=(300, 1290, 200)), "triton")


@GPU
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("num_heads", [16, 32, 128])
def test_latent_bfloat16(num_heads: int, name: str) -> None:
    case = replace(LATENT, formats=(name, name), dtype=BRAIN, device="cuda", page_size=64)
    lengths = {"q_lens": (1, 8, 0, 3, 2), "k_lens": (3000, 333, 5, 1, 0)}
    check(replace(case, dims=(576, 512), group=num_heads, **lengths), "triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_small_scales_do_not_underflow(dims: tuple[int, int], name: str, device: str) -> None:
    """float16 weights times scales of 1e-7 would be 0."""
    case = replace(PAGED, formats=(name, name), dtype=HALF, device=device, padding=0, dims=dims)
    q, keys, options = make_inputs(replace(case, q_lens=(1,) * 5), 0)
    keys.v_scales.mul_(1e-3)
    assert_right(attend(q, keys, impl="triton", **options), q, keys, options)


def some_rows(dtype: torch.dtype = SINGLE, smallest: float = 1e-40) -> torch.Tensor:
    """Rows of many sizes, rounding ties, zeros and numbers almost too small for a scale."""
    rows = torch.randn(64, 3, 96) * 10.0 ** torch.randint(-6, 5, (64, 3, 1))
    rows[0] = 0.0
    rows[1, 0] = torch.arange(-48, 48) + 0.5
    rows[1, 0, 0] = 127.0
    rows[2] = smallest
    rows[3, 1, 32:64] = 0.0
    return rows.to(dtype)


def empty_keys(name: str, dtype: torch.dtype, device: str) -> PagedKV:
    none = torch.zeros(1, dtype=torch.int32, device=device)
    k, scales = empty_store(name, (8, 8, 3, 96), dtype, torch.device(device))
    k.view(torch.uint8).fill_(0)
    v = k.clone(), None if scales is None else scales.clone()
    return PagedKV(k, v[0], none[:, None], none, scales, v[1], dtype)


@every_implementation
def test_q8_0_is_ggmls(impl: str, device: str) -> None:
    gguf = pytest.importorskip("gguf", reason="ggml's own numbers come from its package")
    rows = some_rows(smallest=1e-35)  # ggml divides by a subnormal scale
    keys = empty_keys("q8_0", SINGLE, device)
    slots = torch.randperm(64)
    new = rows.to(device)
    append_kv(keys, new, new, slots.to(device), impl=impl)
    blocks = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.Q8_0)
    theirs = torch.from_numpy(blocks).reshape(64, 3, 3, 2 + BLOCK)
    for cache, scales in ((keys.k, keys.k_scales), (keys.v, keys.v_scales)):
        codes = cache.cpu().flatten(0, 1)[slots]
        assert torch.equal(codes.view(torch.uint8).reshape(64, 3, 3, BLOCK), theirs[..., 2:])
        bits = scales.cpu().flatten(0, 1)[slots].contiguous().view(torch.uint8)
        assert torch.equal(bits.reshape(64, 3, 3, 2), theirs[..., :2])
    decoded = decode(codes, scales.cpu().flatten(0, 1)[slots], SINGLE)
    exact = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(decoded.numpy(), exact.reshape(64, 3, 96))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_both_writers_write_the_same_bits(name: str, dtype: torch.dtype, device: str) -> None:
    rows = some_rows(dtype)
    rows[5, 0, 7], rows[6, 1, 3], rows[7, 2, 95] = torch.nan, torch.inf, -torch.inf
    written = []
    for impl, place in (("torch", "cpu"), ("triton", device)):
        keys = empty_keys(name, dtype, place)
        saturated = torch.zeros(1, dtype=torch.int32, device=place)
        new, slots = rows.to(place), torch.arange(64, device=place)
        append_kv(keys, new, new, slots, impl=impl, saturated=saturated)
        tensors = (keys.k.view(torch.uint8), keys.v.view(torch.uint8), keys.k_scales)
        written.append([x.cpu() for x in (*tensors, keys.v_scales, saturated)])
    for mine, theirs in zip(*written, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_every_e4m3_code_is_read_as_torch_reads_it(dtype: torch.dtype, device: str) -> None:
    """Through attention: a sequence of one key has its value as output."""
    codes = torch.tensor([x if x & 0x7F != 0x7F else 0 for x in range(256)], dtype=torch.uint8)
    v = codes.view(E4M3).view(4, 1, 1, 64).to(device)
    table = torch.arange(4, dtype=torch.int32, device=device)[:, None]
    ones = torch.ones(4, dtype=torch.int32, device=device)
    scales = torch.ones(1, device=device)
    keys = PagedKV(v, v, table, ones, scales, scales, dtype)
    out = attend(torch.zeros(4, 1, 64, dtype=dtype, device=device), keys, impl="triton").out
    assert torch.equal(out[:, 0], v[:, 0, 0].to(dtype))


# The largest error of an element: of its scale's largest number for int8 and Q8_0 (half a step, and
# the rounding of a scale to float16), of itself for fp8 (half of the last of 3 bits).
STEPS = {"int8": 0.5 / 127, "q8_0": 0.5 / 127 + 2.0**-11, "fp8": 2.0**-4, "fp8_tensor": 2.0**-4}


def allowed_error(x: torch.Tensor, name: str) -> torch.Tensor:
    width = BLOCK if name == "q8_0" else x.shape[-1]
    peaks = x.double().unflatten(-1, (-1, width)).abs().amax(-1, keepdim=True)
    if name in ("int8", "q8_0"):
        return (peaks * STEPS[name]).expand(*peaks.shape[:-1], width).flatten(-2)
    scale = FP8_SCALE if name == "fp8_tensor" else peaks / 448.0
    half_subnormal = torch.as_tensor(scale * 2.0**-10, dtype=torch.float64)
    return torch.maximum(x.double().abs() * STEPS[name], half_subnormal.expand(1).reshape(-1, 1)
                         if half_subnormal.dim() == 0 else half_subnormal[..., 0])  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_error_of_a_format(name: str) -> None:
    rows = torch.randn(200, 64)
    codes, scales, saturated = encode(rows, FORMATS[name], torch.tensor([FP8_SCALE]))
    error = (decode(codes, scales, torch.float64) - rows.double()).abs()
    assert int(saturated) == 0
    assert (error <= allowed_error(rows, name) * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_error_against_a_plain_cache(name: str) -> None:
    """Logits move by at most |q| |dk| scale, weights by that much relative, and out with them."""
    q, plain, options = make_inputs(replace(PAGED, dtype=SINGLE), 0)
    _, quantised, _ = make_inputs(replace(PAGED, dtype=SINGLE, formats=(name, name)), 0)
    exact = reference.attend(q, plain, **options)
    state = attend(q, quantised, impl="torch", **options)
    bounds = options["cu_seqlens_q"].tolist()
    for seq in range(plain.num_seqs):
        tokens = slice(bounds[seq], bounds[seq + 1])
        k, v = plain.gather(seq)
        if not len(k) or tokens.start == tokens.stop:
            continue
        k_error, v_error = (allowed_error(x.flatten(0, 1), name) for x in (k, v))
        length = q[tokens].double().norm(dim=-1).amax()
        logit_error = float(length * k_error.norm(dim=-1).amax() * options["scale"]) + 1e-5
        seen = exact.lse[tokens].isfinite()
        assert ((state.lse - exact.lse)[tokens][seen].abs() <= logit_error).all()
        moved = (2.718281828 ** (2 * logit_error) - 1) * v.abs().amax() + v_error.amax() + 1e-5
        assert ((state.out - exact.out)[tokens].abs() <= moved).all()


@every_implementation
@pytest.mark.parametrize("name", QUANTISED)
def test_bad_numbers_stay_in_their_row(name: str, impl: str, device: str) -> None:
    rows = torch.randn(64, 3, 96, device=device)
    bad = rows.clone()
    bad[5, 1, 7], bad[9, 0, 0], bad[9, 0, 31] = torch.nan, torch.inf, -torch.inf
    read = []
    for new in (rows, bad):
        keys = empty_keys(name, SINGLE, device)
        saturated = torch.zeros(1, dtype=torch.int32, device=device)
        if name == "fp8_tensor":
            keys.k_scales.fill_(FP8_SCALE), keys.v_scales.fill_(FP8_SCALE)
        slots = torch.arange(64, device=device)
        append_kv(keys, new, rows, slots, impl=impl, saturated=saturated)
        scales = keys.view().k.scales.ptr
        read.append(decode(keys.k, scales, SINGLE).flatten(0, 1))
        assert saturated.item() == (3 if new is bad else 0)
    good, spoiled = read
    same = torch.ones(64, 3, 96, dtype=torch.bool, device=device)
    same[5, 1], same[9, 0] = False, False
    assert torch.equal(good[same], spoiled[same])
    assert spoiled.isfinite().all()
    assert spoiled[5, 1, 7] == 0
    others = spoiled[9, 0, : BLOCK if name == "q8_0" else 96]
    assert spoiled[9, 0, 0] == -spoiled[9, 0, 31] == others.abs().amax()


def test_what_exceeds_a_fixed_scale_saturates() -> None:
    keys = empty_keys("fp8_tensor", HALF, "cpu")
    keys.k_scales.fill_(0.5)
    rows, saturated = torch.full((1, 3, 96), 300.0).half(), torch.zeros(1, dtype=torch.int32)
    append_kv(keys, rows, rows / 300, torch.tensor([0]), saturated=saturated)
    assert saturated.item() == rows.numel()
    assert (decode(keys.k[0, 0], keys.k_scales, HALF) == 224.0).all()


@every_implementation
@pytest.mark.parametrize("name", QUANTISED)
def test_compiled_whole(name: str, impl: str, device: str) -> None:
    case = replace(PAGED, q_lens=(1, 1), k_lens=(9, 20), padding=0, formats=(name, "int8"))
    q, keys, options = make_inputs(replace(case, device=device), 0)
    new = torch.randn(2, 2, 64, device=device)
    slots = torch.tensor([3, -1], device=device)

    def step(q: torch.Tensor, keys: PagedKV, new: torch.Tensor) -> AttentionState:
        append_kv(keys, new, new, slots, impl=impl)
        return attend(q, keys, impl=impl, scale=options["scale"])

    backend = "aot_eager" if device == "cpu" else "inductor"
    state = torch.compile(step, fullgraph=True, backend=backend)(q, keys, new)
    assert_right(state, q, keys, options)


def test_a_plan_is_for_a_format() -> None:
    case = replace(PAGED, q_lens=(1,) * 5, padding=0)
    q, plain, _ = make_inputs(case, 0)
    _, quantised, _ = make_inputs(replace(case, formats=("plain", "int8")), 0)
    plan = make_plan(q, plain)
    with pytest.raises(ValueError, match="the plan was made for v_format = plain, got int8"):
        attend(q, quantised, plan=plan)


CODES = torch.zeros(4, 8, 2, 64, dtype=torch.int8)
FLOAT8 = CODES.view(E4M3)
ONES = torch.ones(4, 8, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": CODES}, "k of torch.int8 needs k_scales"),
        ({"k": CODES.short()}, "k must be one of .*int8, float8_e4m3fn, got torch.int16"),
        ({"k_scales": ONES}, r"k of torch.float32 has no scales, got \(4, 8, 2\)"),
        ({"k": CODES, "k_scales": ONES[:3]}, r"k_scales must be \(4, 8, 2\) .*, got \(3, 8, 2\)"),
        ({"v": CODES, "v_scales": ONES.half()}, r"v_scales must be \(4, 8, 2, 2\) .*, got \(4, 8"),
        ({"k": FLOAT8, "k_scales": ONES.half()}, "k_scales must be one of float32, got"),
        ({"k": CODES, "k_scales": ONES.double()}, "k_scales must be one of float32, float16, got"),
        ({"k": CODES[..., :40], "k_scales": ONES.half()}, "blocks of 32, got k with 40 columns"),
        ({"k": CODES, "k_scales": torch.ones(1)}, r"k_scales must be \(4, 8, 2\)"),
        ({"k": CODES, "k_scales": ONES.to("meta")}, "k_scales is on meta, expected cpu"),
        ({"k": CODES, "k_scales": ONES, "v": CODES, "v_scales": ONES}, "int8 need query_dtype"),
        ({"query_dtype": HALF}, "k must be one of float16, got torch.float32"),
        ({"query_dtype": torch.int8}, "query_dtype must be one of .*, got torch.int8"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    none = torch.zeros(1, dtype=torch.int32)
    plain = torch.zeros(4, 8, 2, 64)
    given = {"k": plain, "v": plain, "page_table": none[:, None], "seq_lens": none}
    with pytest.raises(ValueError, match=message):
        PagedKV(**(given | changes))


def test_refuses_latent_scales_and_formats() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    codes = CODES[:, :, 0]
    given = {"page_table": none[:, None], "seq_lens": none, "head_dim_v": 32, "query_dtype": HALF}
    with pytest.raises(ValueError, match=r"cache_scales must be \(4, 8, 1\) .*, got \(4, 7, 1\)"):
        LatentKV(codes, cache_scales=torch.ones(4, 7), **given)
    with pytest.raises(ValueError, match="blocks of 32, got head_dim_v with 40 columns"):
        LatentKV(codes, cache_scales=torch.ones(4, 8, 2).half(), **(given | {"head_dim_v": 40}))
    with pytest.raises(ValueError, match=r"a format must be one of plain, .*, got 'fp4'"):
        empty_store("fp4", (4, 8, 2, 64), HALF, torch.device("cpu"))
    with pytest.raises(ValueError, match="blocks of 32, got head_dim with 40 columns"):
        empty_store("q8_0", (4, 8, 2, 40), HALF, torch.device("cpu"))
    keys = LatentKV(codes, cache_scales=torch.ones(4, 8), **given)
    with pytest.raises(ValueError, match=r"k must be one of float32, got torch.float16"):
        attend(torch.zeros(1, 4, 64), keys)
    with pytest.raises(ValueError, match=r"saturated must be \[1\], got shape \(2,\)"):
        append_kv(keys, torch.zeros(1, 64).half(), None, none, saturated=torch.zeros(2).int())


def numbers(dim: int) -> Iterator[torch.Tensor]:
    """Rows [20, 3, dim]: of every size, halfway between codes, not finite, of any bits."""
    x = torch.randn(20, 3, dim)
    yield from (x, x * 1e-20, x * 3e38, x * 1e-42, torch.zeros_like(x))
    yield torch.randint(-127, 128, x.shape) / 2
    yield torch.arange(x.numel()).view_as(x) * 2.0**-11
    holes = x.clone()
    holes[::3, :, ::7], holes[1::5, 1, 3], holes[2, 2] = torch.inf, torch.nan, -torch.inf
    yield holes
    yield torch.randint(-(2**31), 2**31, x.shape).int().view(torch.float32)


@pytest.mark.skipif(native() is None, reason="no C compiler")
@pytest.mark.parametrize("dim", [64, 576])
@pytest.mark.parametrize("name", QUANTISED)
def test_the_kernel_of_a_cpu_writes_what_encode_gives(name: str, dim: int) -> None:
    cpu, slots = torch.device("cpu"), torch.randperm(32)[:20]
    slots[5] = -1
    for x in numbers(dim):
        cache, scales = empty_store(name, (4, 8, 3, dim), torch.float32, cpu, allocate=torch.zeros)
        scales.fill_(0.3)
        store, counted = encoded_store("k", cache, scales), torch.zeros(1, dtype=torch.int32)
        assert encodes_rows(store, x)
        encode_rows(store, x, slots, counted)
        kept = slots >= 0
        codes, right, beyond = encode(x[kept], FORMATS[name], scales)
        places = slots[kept] // 8, slots[kept] % 8
        assert torch.equal(cache.view(torch.int8)[places], codes.view(torch.int8))
        assert counted == beyond
        if FORMATS[name].scaling != "tensor":
            assert torch.equal(scales[places].view_as(right), right)
    with pytest.raises(IndexError, match="token 1 has slot 32, but there are 32 slots"):
        encode_rows(store, x[:2], torch.tensor([3, 32]), None)
