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

from anabranch.kernels.linear_config import (
    LinearConfig,
    every_linear_config,
    fit_linear,
    select_linear,
)
from anabranch.kernels.triton.linear import linear as launch
from anabranch.linear import linear

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CONFIGS = {
    "short": LinearConfig(1, 4, 32, 4, overlap=False),
    "long": LinearConfig(1, 2, 128, 4, overlap=False),
    "wide": LinearConfig(1, 64, 16, 4, overlap=False),
}
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def operands(
    num_rows: int, n: int, k: int, dtype: torch.dtype, device: str, *, biased: bool = False
) -> Operands:
    x, w, bias = torch.randn(num_rows, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    x, w, bias = (tensor.to(device, dtype) for tensor in (x, w, bias))
    return x, w, bias if biased else None


def assert_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None):
    wide = None if bias is None else bias.double()
    exact = functional.linear(x.double(), w.double(), wide)
    assert_close(y, exact, functional.linear(x, w, bias))


def run(config: LinearConfig, arguments: Operands) -> torch.Tensor:
    x, w, bias = arguments
    y = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    launch(x, w, bias, y, config)
    return y


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (37, 104), (129, 264)])
def test_product(config: LinearConfig, num_rows: int, n: int, k: int) -> None:
    arguments = operands(num_rows, n, k, torch.bfloat16, DEVICE, biased=num_rows == 2)
    assert_product(run(config, arguments), *arguments)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_strided_rows(config: LinearConfig) -> None:
    _, w, _ = operands(3, 37, 64, torch.float16, DEVICE)
    x = torch.randn(2, 3, 128).to(w)[:, 1, 32:96]
    wide = torch.full((37, 72), torch.nan).to(w)
    wide[:, :64] = w
    y = torch.full((2, 80), torch.nan).to(w)
    launch(x, wide[:, :64], None, y[:, :37], config)
    assert_product(y[:, :37], x, w, None)
    assert y[:, 37:].isnan().all()


def test_choice() -> None:
    assert select_linear(1, 4096, 4096, 2) != select_linear(1, 6144, 4096, 2)
    assert select_linear(2, 4096, 4096, 2)
    refused = [(0, 4096, 4096, 2), (3, 4096, 4096, 2), (1, 4096, 4096, 4), (1, 64, 512, 2)]
    for call in [*refused, (2, 28672, 4096, 2), (1, 4096, 4100, 2)]:
        assert select_linear(*call) is None, call
    for config in every_linear_config():
        assert config.overlap
        assert not fit_linear(config, hopper=False).overlap


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_small_products_are_torchs(shape: tuple[int, ...], biased: bool) -> None:
    x, w, bias = torch.randn(shape), torch.randn(7, 5), torch.randn(7) if biased else None
    assert torch.equal(linear(x, w, bias), functional.linear(x, w, bias))


def test_operator_is_well_formed() -> None:
    x, w, bias = operands(3, 7, 16, torch.float32, DEVICE, biased=True)
    torch.library.opcheck(
        torch.ops.anabranch.linear.default, (x, w, bias), test_utils="test_schema"
    )
    torch.library.opcheck(torch.ops.anabranch.linear.default, (x[None], w, None))


def test_compiles_once_for_all_rows() -> None:
    w, bias = torch.randn(7, 16), torch.randn(7)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: linear(2 * x, w, bias) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    compiled(torch.randn(3, 16))
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_rows in (5, 8):
            x = torch.randn(num_rows, 16)
            assert torch.equal(compiled(x), functional.linear(2 * x, w, bias) + 1)


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


@pytest.mark.parametrize("case", ["1 x 4", "1 x 2", "2 x 4"])
def test_weights_are_on_their_way_before_the_wait(case: str, tmp_path: Path) -> None:
    """On Hopper, and 16 bytes at a time."""
    script = (
        "import json, sys; from anabranch.kernels import compile as c;"
        "from anabranch.kernels.triton.linear import compile_cases; t = c.TARGETS['sm_90'];"
        "call = next(f for n, f in compile_cases(t.shared_bytes) if n.startswith(sys.argv[1]));"
        "print(json.dumps(c.compile_launch(c.record(call)[0], t).asm['ptx']))"
    )
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script, case]
    ptx = json.loads(
        subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    )
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait
    assert re.search(r"ld\.global.*\.v4\.b32", before)
    assert "st.global" in after


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (1000, 4928), (4096, 14336)])
def test_sizes_of_real_models(n: int, k: int, num_rows: int, dtype: torch.dtype) -> None:
    arguments = operands(num_rows, n, k, dtype, "cuda", biased=num_rows == 3)
    assert_product(linear(*arguments), *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2])
def test_graph_of_a_chain(num_rows: int) -> None:
    """Kernels that overlap wait for each other: the third reads what the second wrote."""
    weights = [operands(1, 4096, 4096, torch.bfloat16, "cuda")[1] for _ in range(3)]
    x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16, device="cuda")

    def chain() -> torch.Tensor:
        y = x
        for w in weights:
            y = linear(y, w)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        expected = chain().clone()
        graph.replay()
        assert torch.equal(y, expected)
