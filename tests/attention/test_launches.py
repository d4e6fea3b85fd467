"""Launches that are prepared once: what is described, what is recorded, what runs again."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, assert_right, integers, make_inputs

import anabranch.launches
from anabranch import AttentionState, append_kv, attend, make_plan, producers
from anabranch.append import APPENDS
from anabranch.attend import CALLS
from anabranch.launches import prepare, recorder
from anabranch.launches.extension import build_extension
from anabranch.plan import PLANS

DLPACK_CPU, CONTEXT = 1, 7
BRAIN = torch.bfloat16


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class FakeDriver:
    """Keeps what is launched: (function, grid, threads, shared bytes, attributes, parameters)."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.launched = sizes, list[tuple[Any, ...]]()
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self.functions = [
            ctypes.CFUNCTYPE(integer, ctypes.POINTER(Config), pointer, pointer, pointer)(
                self.launch
            ),
            ctypes.CFUNCTYPE(integer, ctypes.POINTER(pointer))(self.get_context),
            ctypes.CFUNCTYPE(integer, pointer)(lambda _: 0),
            ctypes.CFUNCTYPE(integer, pointer)(lambda _: 0),
            ctypes.CFUNCTYPE(integer, integer, pointer)(lambda *_: 0),
            ctypes.CFUNCTYPE(integer, *[pointer] * 12)(lambda *_: 0),
            ctypes.CFUNCTYPE(integer, pointer, pointer)(self.move_map),
        ]

    def addresses(self) -> tuple[int, ...]:
        return tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.functions)

    def launch(self, config: Any, function: int, parameters: int, _: int) -> int:
        config = config.contents
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.string_at(places[i], size) for i, size in enumerate(self.sizes)]
        grid, threads = tuple(config.grid), config.block[0]
        shape = (grid, threads, config.shared_bytes, config.num_attributes)
        self.launched.append((function, *shape, values))
        return 0

    def get_context(self, place: Any) -> int:
        place[0] = CONTEXT
        return 0

    def move_map(self, place: int, address: int) -> int:
        ctypes.memmove(place, address.to_bytes(8, "little"), 8)
        return 0


@pytest.fixture(scope="module")
def fake() -> SimpleNamespace:
    """launches.c on a driver that launches nothing, for CPU tensors."""
    try:
        source = Path(anabranch.launches.__file__).with_name("launches.c")
        launches = build_extension(source)
    except RuntimeError as error:
        pytest.skip(str(error))
    driver = FakeDriver((4, 8, 8, 128))
    table = torch.Tensor.__dlpack_c_exchange_api__
    launches.attach(table)
    launches.connect(DLPACK_CPU, driver.addresses())
    return SimpleNamespace(launches=launches, driver=driver)


def test_a_description_tells_kinds_apart(fake: SimpleNamespace) -> None:
    describe = fake.launches.describe
    x, y = torch.zeros(4, 8), torch.zeros(4, 8)
    assert describe((x, None)) == describe((y, None))
    both = torch.zeros(2, 4, 16)
    others = [
        (x, y),  # another tensor more
        (torch.zeros(8, 4), None),
        (torch.zeros(8, 4).t(), None),
        (x.half(), None),
        (both[0, :, :8], None),
        (torch.zeros(33)[1:].view(4, 8), None),  # another alignment
        (torch.zeros(4, 8, requires_grad=True), None),
    ]
    found = [describe(tensors) for tensors in others]
    assert None not in found
    assert len({describe((x, None)), *found}) == 8
    assert describe((x, x)) != describe((x, y)), "one tensor given twice is another kind"
    assert describe((torch.empty(4, 8, device="meta"),)) is None
    assert describe((torch.empty(0),)) is None


def test_pointers_of_the_call_reach_the_kernel(fake: SimpleNamespace) -> None:
    launches, driver = fake.launches, fake.driver
    value, pointer, map_ = (prepare.VALUE, prepare.POINTER, prepare.MAP)
    parameters = ((value, 0, 77, 0, b""), (pointer, 1, 16, 0, b""), (pointer, 0, 0, 0, b""))
    parameters += ((map_, 1, 0, 0, bytes(range(128))),)
    launch = (1234, (3, 2, 1), (256, 1, 1), 4096, 1, parameters)
    prepared = launches.prepare(CONTEXT, 0, 3, (launch, launch))
    for _ in range(2):
        x, y = torch.zeros(8), torch.zeros(64)
        driver.launched.clear()
        launches.run(prepared, (x, y, None))
        address = partial(int.to_bytes, length=8, byteorder="little")
        expected = [
            (77).to_bytes(4, "little"),
            address(y.data_ptr() + 16),
            address(x.data_ptr()),
            address(y.data_ptr()) + bytes(range(8, 128)),
        ]
        assert driver.launched == [(1234, (3, 2, 1), 256, 4096, 1, expected)] * 2
    with pytest.raises(TypeError, match="3 tensors"):
        launches.run(prepared, (x, y))


def test_memory_that_is_shared_is_seen(fake: SimpleNamespace) -> None:
    is_apart = fake.launches.is_apart
    x = torch.zeros(64)
    assert is_apart((x[:32],), (x[32:], None))
    assert not is_apart((x[:32],), (None, x[31:]))
    assert not is_apart((torch.zeros(4), x[1::2]), (x[::2],)), "interleaved memory counts as shared"


@dataclass
class Lone:
    """A kernel that takes one tensor."""

    arg_names: tuple[str, ...] = ("x",)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_arguments, **_options: SimpleNamespace(grid=grid)


@pytest.mark.parametrize(
    ("extra", "complete"),
    [
        (lambda x: x.view(-1)[2:], True),
        (torch.empty_like, True),
        (lambda x: x.add_(1), False),
        (lambda x: x.t().contiguous(), False),
    ],
)
def test_operations_that_would_have_to_run_again(extra: Any, complete: bool) -> None:
    x = torch.ones(4, 4)
    with recorder.record(torch.device("cuda")) as recording:
        recorder.launch(Lone(), (1,), x)
        extra(x)
    assert recording.complete == complete
    assert [start.values for start in recording.launched] == [{"x": x}]
    recorder.launch(Lone(), (1,), x)
    assert len(recording.launched) == 1, "nothing is recorded after the call"


def test_places_of_pointers() -> None:
    cache = torch.zeros(2, 64)
    k, v, q = cache[0], cache[1], torch.zeros(8)
    place = prepare.Places(((q, None), (k, v))).find
    assert place(v) == (3, 0)
    assert place(q[2:]) == (0, 8)
    with pytest.raises(prepare.NotRecordable):
        place(k[3:])  # of k or of v: both lie there
    with pytest.raises(prepare.NotRecordable):
        place(torch.zeros(8))
    with pytest.raises(prepare.NotRecordable):
        prepare.Places(((q,), (q,))).find(q)


def test_maps_of_more_than_was_described() -> None:
    """Whose sizes later calls of the kind need not have."""
    keys = torch.zeros(12, 2, 16)
    box = SimpleNamespace(base=keys, shape=[12, 32], strides=[32, 1])
    for described in (keys, keys.view(3, 4, 2, 16), keys[:, :, :]):
        assert prepare.Places(((described,),)).find_mapped(box) == (0, 0)
    for described in (keys[0], keys[:11], keys[..., :8]):
        with pytest.raises(prepare.NotRecordable):
            prepare.Places(((described,),)).find_mapped(box)


def gpu_cases() -> dict[str, Case]:
    decode = Case(
        q_lens=(1, 1, 1), k_lens=(70, 300, 5), page_size=16, group=4, dims=(128, 128), dtype=BRAIN
    )
    decode = replace(decode, num_kv_heads=2, device="cuda", padding=0)
    prompt = replace(decode, q_lens=(200, 130, 5), k_lens=(200, 400, 5))
    latent = replace(
        decode, source="latent", num_kv_heads=1, group=16, dims=(576, 512), page_size=64
    )
    return {
        "decode": decode,
        "verify": replace(decode, q_lens=(4, 4, 4), sinks=True, padding=3),
        "tree": replace(decode, q_lens=(4, 4, 4), tree_width=4),
        "dense prompt": replace(prompt, source="dense"),
        "packed prompt": replace(prompt, source="ragged", window=64),
        "paged prompt": replace(prompt, softcap=20.0),
        "fp8": replace(decode, formats=("fp8", "fp8")),
        "int8 prompt": replace(prompt, formats=("int8", "q8_0")),
        "latent": latent,
        "latent fp8": replace(latent, formats=("fp8", "fp8")),
        "float32": replace(decode, dtype=torch.float32),
    }


@pytest.fixture
def forgotten() -> None:
    for kinds in (CALLS, PLANS, APPENDS):
        kinds.clear()


def only_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the long way is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the long way")

    modules = [producers.load_producer(name) for name in producers.PRODUCERS]
    for module in modules:
        monkeypatch.setattr(module, "attend", refuse)
        monkeypatch.setattr(module, "fill_plan", refuse)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["planned", "unplanned", "out", "prior"])
@pytest.mark.parametrize("name", gpu_cases())
def test_later_calls_of_a_kind(
    name: str, way: str, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other tensors, which the reference knows the answer of."""
    case = gpu_cases()[name]
    if way == "prior" and not set(name.split()) & {"decode", "verify", "tree", "fp8"}:
        pytest.skip("prior states are merged after the Hopper kernels, by another launch")
    for seed in range(3):
        q, keys, options = make_inputs(case, seed)
        given: dict[str, Any] = {}
        if way in ("planned", "out"):
            planned = {x: options[x] for x in ("cu_seqlens_q", "causal", "window", "tree_mask")}
            given["plan"] = make_plan(q, keys, **planned)
        state = AttentionState(
            torch.empty(*q.shape[:2], keys.head_dim_v, dtype=q.dtype, device="cuda"),
            torch.empty(q.shape[:2], device="cuda"),
        )
        if way == "out":
            given["out"] = state
        if way == "prior":
            given["prior"] = AttentionState.empty(
                tuple(state.out.shape), dtype=q.dtype, device="cuda"
            )
        state = attend(q, keys, **options, **given)
        assert_right(state, q, keys, options)
        only_prepared(monkeypatch)


@pytest.mark.gpu
def test_a_changed_call_is_checked(forgotten: None) -> None:
    case = gpu_cases()["decode"]
    q, keys, options = make_inputs(case, 0)
    plan = make_plan(q, keys, cu_seqlens_q=options["cu_seqlens_q"])
    for _ in range(2):
        state = attend(q, keys, plan=plan, **options)
    with pytest.raises(ValueError, match="k must be one of"):
        attend(q.half(), keys, plan=plan, **options)
    with pytest.raises(ValueError, match="plan was made for num_tokens"):
        attend(q[:2], keys, plan=plan, **{**options, "cu_seqlens_q": options["cu_seqlens_q"]})
    with pytest.raises(ValueError, match="overlaps"):
        attend(q, keys, plan=plan, out=AttentionState(q, state.lse), **options)
    with pytest.raises(ValueError, match="requires grad"):
        attend(q.clone().requires_grad_(), keys, plan=plan, **options)
    with pytest.raises(ValueError, match="page_table"):
        replace(keys, page_table=keys.page_table.long())


@pytest.mark.gpu
def test_new_tokens_of_a_kind(forgotten: None) -> None:
    case = gpu_cases()["decode"]
    _, keys, _ = make_inputs(case, 0)
    for seed in range(3):
        torch.manual_seed(seed)
        k, v = torch.randn(2, 5, 2, 128, dtype=BRAIN, device="cuda")
        slots = integers(case, [3, 17, -1, 40, 8])
        append_kv(keys, k, v, slots)
        for rows, new in ((keys.k, k), (keys.v, v)):
            kept = [0, 1, 3, 4]
            assert torch.equal(rows.flatten(0, 1)[slots[kept].long()], new[kept])
    assert None not in APPENDS.values()


def test_calls_of_a_kind_are_checked_once_on_a_cpu(
    fake: SimpleNamespace, forget_calls: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later calls skip the checks; what has another shape is another kind, and is checked."""
    checked: list[object] = []
    module = sys.modules["anabranch.attend"]
    check = module._check_call
    monkeypatch.setattr(
        module, "_check_call", lambda *given: checked.append(given) or check(*given)
    )
    for seed in range(3):
        q, keys, options = make_inputs(Case(q_lens=(1,), k_lens=(9,)), seed)
        assert_right(attend(q, keys, **options), q, keys, options)
    assert len(checked) == 1
    with pytest.raises(ValueError, match="q has"):
        attend(q[:, :-1], keys, **options)
