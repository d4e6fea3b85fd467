"""GGUF files as codes for GPUs: the numbers they stand for, products, and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch.nn import functional

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf_blocks import random_rows  # noqa: E402
from gguf_files import SIZES, tiny_llama, write_gguf  # noqa: E402

from anabranch.llm.models import Activations, load_model  # noqa: E402
from anabranch.llm.models.fetched_models import (  # noqa: E402
    WeightForm,
    gguf_directory,
    models_directory,
)
from anabranch.llm.models.fused_projections import gate_joined, join_projections  # noqa: E402
from anabranch.llm.models.gguf_codes import FORMATS, code_tensors  # noqa: E402
from anabranch.llm.models.model_config import read_config, scheme_of  # noqa: E402
from anabranch.llm.models.quantised_linear import QuantisedLinear, set_quantised  # noqa: E402
from anabranch.llm.models.quantised_model import load_quantised  # noqa: E402
from anabranch.llm.models.quantised_tensors import read_codes  # noqa: E402
from anabranch.llm.models.quantised_weight import Codes, QuantisedWeight  # noqa: E402
from anabranch.llm.models.weight_scheme import read_scheme  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16  # the interpreter multiplies no bfloat16
PROMPT = torch.tensor([[5, 17, 250, 3, 99, 1, 0, 42]])
SCHEME = read_scheme({"quant_method": "gguf"}, "a test")
EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0", "weight": "Q4_K"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))


def codes_of(raw: Any, name: str, n: int, k: int) -> Codes:
    tensors = code_tensors(raw, name, k)
    assert tensors is not None
    return read_codes(tensors, SCHEME, n, k)


def numbers(codes: Codes) -> torch.Tensor:
    """float64 [n, k]."""
    signed = codes.codes.double() if codes.kind == "int4" else codes.codes.view(torch.int8).double()
    zeros = 8.0 * (codes.kind == "int4") if codes.zeros is None else spread(codes.zeros, signed)
    return (signed - zeros) * spread(codes.scales, signed)


def spread(groups: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return groups.double().repeat_interleave(like.shape[1] // groups.shape[1], 1)


def reach(codes: Codes) -> torch.Tensor:
    """The largest number that each group can hold."""
    ends = (0, 15) if codes.kind == "int4" else (-16, 15)
    zeros = codes.zeros
    assert zeros is not None
    furthest = torch.stack([(end - zeros.double()).abs() for end in ends]).amax(0)
    return furthest * codes.scales.double().abs()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 3), (130, 2)])
def test_numbers(name: str, n: int, k: int) -> None:
    k *= 256 if name.endswith("_K") else 32
    raw, values = random_rows(name, n, k)
    if k == 32 and name in ("Q4_1", "Q5_1"):
        assert code_tensors(raw, name, k) is None
        return
    codes = codes_of(raw, name, n, k)
    found, values = numbers(codes), values.double()
    if name in EXACT:
        assert torch.equal(found, values)
    elif codes.zeros is None:
        assert ((found - values).abs() <= values.abs() * 2**-11).all()
    else:
        assert ((found - values).abs() <= spread(reach(codes), values) * 2**-10).all()


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_groups_of_equal_numbers(name: str) -> None:
    """Those without a scale, and with one that is lost beside their minimum."""
    raw, _ = random_rows(name, 1, 6 * 32)
    blocks = raw.reshape(6, -1)
    scales = np.array([0, 0, 1e-7, 1e-7, -1e-5, 1e-4], np.float16)
    minima = np.array([0.5, 0, 0.5, -3, 2, 4], np.float16)
    blocks[:, :4] = np.stack([scales, minima], 1).view(np.uint8)
    kind = __import__("gguf").GGMLQuantizationType[name]
    values = torch.from_numpy(__import__("gguf").quants.dequantize(raw, kind)).double()
    codes = codes_of(raw, name, 1, 6 * 32)
    errors = (numbers(codes) - values).abs().view(6, 32).amax(1)
    assert (errors <= values.abs().view(6, 32).amax(1) * 2**-10).all()
    assert errors[:2].tolist() == [0, 0]


def test_what_is_not_finite_or_not_known_is_kept_as_numbers() -> None:
    raw, _ = random_rows("Q4_K", 3, 512)
    for place, value in ((0, np.inf), (2, np.nan)):
        damaged = raw.copy()
        damaged[1, place : place + 2] = np.array([value], np.float16).view(np.uint8)
        assert code_tensors(damaged, "Q4_K", 512) is None
    large = raw.copy()
    large[:, :2] = np.array([60000], np.float16).view(np.uint8)
    assert code_tensors(large, "Q4_K", 512) is None
    assert code_tensors(raw, "Q3_K", 512) is None


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 37, 96), (5, 64, 128), (17, 48, 384)])
def test_products(name: str, rows: int, n: int, k: int) -> None:
    """By the kernel that is chosen, against the numbers of the file."""
    k = 256 * -(-k // 128) if name.endswith("_K") else k
    raw, values = random_rows(name, n, k)
    weight = QuantisedWeight(codes_of(raw, name, n, k), dtype=DTYPE).to(DEVICE)
    linear = torch.nn.Linear(k, n, bias=False, device="meta")
    set_quantised(linear, weight)
    x = torch.randn(rows, k).to(DEVICE, DTYPE)
    values = values.to(DEVICE)
    by_torch = functional.linear(x, values.to(DTYPE))
    assert_close(linear(x), functional.linear(x.double(), values.double()), by_torch)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(PROMPT.to(device), use_cache=False).logits.float().cpu()


def kept(path: Path) -> Any:
    """A model whose weights stay codes; without a GPU, kernels are interpreted."""
    directory = gguf_directory(path, form=WeightForm.CODES)
    config = read_config(directory / "config.json")
    scheme = scheme_of(config)
    assert scheme is not None
    options: Any = {"device": DEVICE, "dtype": DTYPE, "attn_implementation": "sdpa"}
    return load_quantised(directory, config, scheme, expand=False, **options).eval()


CASES: dict[str, tuple[dict[str, str], dict[str, Any], int]] = {
    "Q4_0": ({"weight": "Q4_0"}, {}, 15),
    "Q4_1, tied": ({"weight": "Q4_1"}, {"tie_word_embeddings": True}, 14),
    "Q5_1 and F16": ({"attn": "F16", "weight": "Q5_1"}, {}, 2 * 3 + 1),
    "K": (MIXED, WIDE, 8),
    "not codes": ({"ffn": "TQ2_0", "weight": "Q8_0"}, WIDE, 4 + 1),
    "floats": ({}, {}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    formats, changes, count = CASES[case]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(**changes), formats=formats)
    expected = logits(load_model(str(path), device="cpu").model)
    model = kept(path)
    linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(linears) == count
    size = expected.abs().max()
    assert (logits(model) - expected).abs().max() <= 0.01 * size
    join_projections(model)
    assert gate_joined(model) == len(model.model.layers)
    assert (logits(model) - expected).abs().max() <= 0.01 * size


def test_weights_of_the_directory(tmp_path: Path) -> None:
    """They are expanded where there is no GPU, to what the file says but for 16-bit scales."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q5_0"})
    expected = load_model(str(path), device="cpu").model.state_dict()
    found = load_model(str(gguf_directory(path, form=WeightForm.CODES)), device="cpu").model
    for name, weight in found.state_dict().items():
        plain = "proj" not in name and "lm_head" not in name  # in bfloat16, as on a GPU
        number = expected[name].bfloat16().float() if plain else expected[name]
        assert torch.equal(weight, number), name


def test_other_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from gguf_files import GGUF_NAMES

    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 128}, tie_word_embeddings=True)
    model = transformers.Qwen3ForCausalLM(config).eval()
    monkeypatch.setitem(GGUF_NAMES, "self_attn.q_norm", "attn_q_norm")
    monkeypatch.setitem(GGUF_NAMES, "self_attn.k_norm", "attn_k_norm")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, pre="qwen2", arch="qwen3", formats={"weight": "Q4_0"})
    expected = logits(load_model(str(path), device="cpu").model)
    loaded = kept(path)
    assert sum(isinstance(x, QuantisedLinear) for x in loaded.modules()) == 2 * 7
    assert (logits(loaded) - expected).abs().max() <= 0.01 * expected.abs().max()


def test_form_of_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPUs keep codes unless a dtype is given; ranks, and callers that keep nothing, floats."""
    asked: list[WeightForm] = []

    def directory(path: Path, *, form: WeightForm, progress: Any) -> Path:
        asked.append(form)
        raise InterruptedError

    monkeypatch.setattr("anabranch.llm.models.load.gguf_directory", directory)
    path = tmp_path / "a.gguf"
    path.touch()
    for options in (
        {"activations": Activations.INT8},
        {"activations": Activations.INT8, "dtype": torch.float16},
        {"activations": Activations.INT8, "cut": lambda _: None},
        {},
    ):
        with pytest.raises(InterruptedError):
            load_model(str(path), device="cuda", **options)
    assert asked == [WeightForm.CODES, *[WeightForm.FLOATS] * 3]


def test_files_are_converted_once_and_stay_small(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_1"})
    steps: list[str] = []
    first, again = (
        gguf_directory(path, form=WeightForm.CODES, progress=steps.append) for _ in range(2)
    )
    assert first == again and steps == ["packing tiny.gguf"]
    assert [each.name for each in models_directory().iterdir()] == [first.name]
    assert first.name.endswith("-codes")
    sizes = [
        sum(x.nbytes for x in load_weights(first, part).values()) for part in ("proj", "embed")
    ]
    linear = sum(x.numel() for name, x in tiny_llama().state_dict().items() if "proj" in name)
    assert sizes[0] == linear * (4 + 16 / 32 + 16 / 32) / 8 + 14 * 16, "5 bits, and shapes"
    assert sizes[1] == 300 * 64 * 2


def load_weights(directory: Path, part: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if part in name}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Whatever byte of the header is changed, or wherever the file ends."""
    content = write_gguf(
        tmp_path / "tiny.gguf", tiny_llama(), formats={"weight": "Q4_1"}
    ).read_bytes()
    end = content.index(b"<unused")  # what comes before says what the model is
    draw, refused = np.random.default_rng(0), 0
    for turn in range(40):
        damaged = bytearray(content)
        if turn % 2:
            damaged = damaged[: draw.integers(0, len(damaged))]
        else:
            damaged[draw.integers(0, end)] ^= draw.integers(1, 256)
        path = tmp_path / f"damaged{turn}.gguf"
        path.write_bytes(damaged)
        try:
            gguf_directory(path, form=WeightForm.CODES)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused >= 20
    names = [each.name for each in models_directory().iterdir()]
    assert len(names) == 40 - refused and not any(name.startswith(".") for name in names)
