"""linear(): a row or two times a weight, by the kernel and the operator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional

from anabranch.kernels.layers.linear import linear as launch
from anabranch.kernels.layers.linear_config import (
    LinearConfig,
    every_linear_config,
    fit_linear,
    select_linear,
)
from anabranch.llm.models.row_linear import gated_linear, linear

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CONFIGS = {
    "short": LinearConfig(4, 32, 4, overlap=False),
    "long": LinearConfig(2, 128, 4, overlap=False),
    "wide": LinearConfig(64, 16, 4, overlap=False),
}


def operands(
    n: int, k: int, dtype: torch.dtype, device: str = DEVICE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w, bias = torch.randn(k), torch.randn(n, k) / k**0.5, torch.randn(n)
    return x.to(device, dtype), w.to(device, dtype), bias.to(device, dtype)


def gate(joined: torch.Tensor) -> torch.Tensor:
    first, second = joined.chunk(2, -1)
    return functional.silu(first) * second


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (37, 104), (129, 264)])
def test_product(config: LinearConfig, biased: bool, n: int, k: int) -> None:
    x, w, bias = operands(n, k, torch.bfloat16)
    given = bias if biased else None
    y = torch.full_like(bias, torch.nan)
    launch(x, w, given, y, config)
    exact = functional.linear(x.double(), w.double(), bias.double() if biased else None)
    assert_close(y, exact, functional.linear(x, w, given))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("n", "k"), [(1, 8), (37, 104), (129, 264)])
def test_gated_product(config: LinearConfig, n: int, k: int) -> None:
    x, w, _ = operands(2 * n, k, torch.bfloat16)
    y = torch.full((n,), torch.nan).to(x)
    launch(x, w, None, y, config, gated=True)
    assert_close(y, gate(functional.linear(x.double(), w.double())), gate(functional.linear(x, w)))


def test_strided_rows() -> None:
    x, w, _ = operands(37, 64, torch.float16)
    wide = torch.full((37, 72), torch.nan).to(w)
    wide[:, :64] = w
    y = torch.full((40,), torch.nan).to(w)
    launch(x, wide[:, :64], None, y[:37], CONFIGS["short"])
    exact = functional.linear(x.double(), w.double())
    assert_close(y[:37], exact, functional.linear(x, w))
    assert y[37:].isnan().all()


def test_choice() -> None:
    assert select_linear(1, 4096, 4096, 2) != select_linear(1, 6144, 4096, 2)
    refused = [(0, 4096, 4096, 2), (2, 4096, 4096, 2), (1, 4096, 4096, 4), (1, 64, 512, 2)]
    for call in [*refused, (1, 4096, 4100, 2)]:
        assert select_linear(*call) is None, call
    for config in every_linear_config():
        assert config.overlap
        assert not fit_linear(config, hopper=False).overlap


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_small_products_are_torchs(shape: tuple[int, ...], biased: bool) -> None:
    x, w, bias = torch.randn(shape), torch.randn(7, 5), torch.randn(7) if biased else None
    assert torch.equal(linear(x, w, bias), functional.linear(x, w, bias))
    joined = torch.cat([w, w.flip(0)])
    assert torch.equal(gated_linear(x, joined), gate(functional.linear(x, joined)))


def test_operators_are_well_formed() -> None:
    x, w, bias = operands(8, 16, torch.float32)
    check = torch.library.opcheck
    check(torch.ops.anabranch.linear.default, (x, w, bias), test_utils="test_schema")
    check(torch.ops.anabranch.linear.default, (x[None], w, None))
    check(torch.ops.anabranch.gated_linear.default, (x[None], w))


def test_compiles_once_for_one_row_and_once_for_others() -> None:
    w, bias = torch.randn(8, 16), torch.randn(8)
    torch._dynamo.reset()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(2 * x, w, bias), gated_linear(x, w)], 1)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_rows in (3, 1):
        compiled(torch.randn(num_rows, 16))
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_rows in (5, 8, 1):
            x = torch.randn(num_rows, 16)
            assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 6)}, "x has k = 6, but w has k = 5"),
        ({"x": torch.tensor(1.0)}, "x must have at least one dimension"),
        ({"w": torch.zeros(5)}, r"w must be \[n, k\], got shape \(5,\)"),
        ({"x": torch.zeros(3, 5).half()}, "x must be one of float32, got torch.float16"),
        ({"x": torch.zeros(3, 5, device="meta")}, "x is on meta, expected cpu"),
        ({"bias": torch.zeros(6)}, "bias has n = 6, but w has n = 7"),
        ({"bias": torch.zeros(7).double()}, "bias must be one of float32, got torch.float64"),
        ({"w": torch.zeros(7, 5, requires_grad=True)}, "w requires grad"),
    ],
)
def test_refuses(changes: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(3, 5), "w": torch.zeros(7, 5), "bias": torch.zeros(7)}
    with pytest.raises(ValueError, match=message):
        linear(**(arguments | changes))


def test_gates_need_as_many_rows_as_ups() -> None:
    with pytest.raises(ValueError, match="as many rows of gate as of up, got 7"):
        gated_linear(torch.zeros(5), torch.zeros(7, 5))


def test_weights_are_on_their_way_before_the_wait(tmp_path: Path) -> None:
    """On Hopper, and 16 bytes at a time."""
    names = ["4 x 1024 bfloat16", "2 x 2048 bfloat16 gated"]
    script = (
        "import json, sys; import compiled_launch as c;"
        "from layer_cases import linear_cases; t = c.TARGETS['sm_90'];"
        "every = list(linear_cases(t.shared_bytes));"
        "calls = [next(f for n, f in every if n.startswith(name)) for name in sys.argv[1:]];"
        "launches = [c.record(call)[0] for call in calls];"
        "print(json.dumps([c.compile_launch(each, t).asm['ptx'] for each in launches]))"
    )
    environment = dict(
        os.environ, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path)
    )
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", script, *names], env=environment, capture_output=True, check=True
    )
    for name, ptx in zip(names, json.loads(run.stdout), strict=True):
        before, wait, after = ptx.partition("griddepcontrol.wait")
        assert wait, name
        assert re.search(r"ld\.global.*\.v4\.b32", before), name
        assert "st.global" in after, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (1000, 4928), (4096, 14336)])
def test_sizes_of_real_models(n: int, k: int, dtype: torch.dtype) -> None:
    x, w, bias = operands(n, k, dtype, "cuda")
    exact = functional.linear(x.double(), w.double(), bias.double())
    assert_close(linear(x, w, bias), exact, functional.linear(x, w, bias))
    exact = gate(functional.linear(x.double(), w.double()))
    assert_close(gated_linear(x, w), exact, gate(functional.linear(x, w)))


@pytest.mark.gpu
def test_graph_of_a_chain() -> None:
    """Kernels that overlap wait for each other: the third reads what the second wrote."""
    weights = [operands(4096, 4096, torch.bfloat16, "cuda")[1] for _ in range(3)]
    x = torch.zeros(1, 4096, dtype=torch.bfloat16, device="cuda")

    def chain() -> torch.Tensor:
        y = x
        for w in weights:
            y = linear(y, w)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(y, chain())
