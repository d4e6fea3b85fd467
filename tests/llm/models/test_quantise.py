"""`anabranch quantize`: what it writes is read again, smaller and near what it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from gguf_files import tiny_llama, write_gguf  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from anabranch.kernels.cpu.native import native  # noqa: E402
from anabranch.llm.cli.command_group import app  # noqa: E402
from anabranch.llm.cli.quantize import TEXT, perplexity  # noqa: E402
from anabranch.llm.models import load_model  # noqa: E402
from anabranch.llm.models.gguf_metadata import open_gguf  # noqa: E402
from anabranch.llm.models.gguf_quantise import encode_q4_k  # noqa: E402
from anabranch.llm.models.quantise_weights import fp8_tensors, int4_tensors  # noqa: E402
from anabranch.llm.models.quantised_tensors import read_codes  # noqa: E402
from anabranch.llm.models.quantised_weight import QuantisedWeight  # noqa: E402
from anabranch.llm.models.weight_scheme import WeightScheme  # noqa: E402

WIDE = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64, "vocab_size": 300}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    native()  # from the cache of all tests


def quantize(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["quantize", *arguments], env={"COLUMNS": "80"})


@torch.inference_mode()
def logits(path: Path) -> torch.Tensor:
    model: Any = load_model(str(path), device="cpu").model
    return model(torch.tensor([[5, 17, 250, 3, 99]]), use_cache=False).logits


def read(tensors: dict[str, torch.Tensor], kind: str, n: int, k: int) -> torch.Tensor:
    codes = read_codes(tensors, WeightScheme("compressed-tensors", kind), n, k)
    return QuantisedWeight(codes, dtype=torch.float32).expanded()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_q4_k() -> None:
    """Against the package's decoder; 4 bits and a least for each part of 32 numbers."""
    numbers = torch.randn(64, 8, 32) * torch.rand(64, 8, 1)
    numbers[0], numbers[1] = 0, 1
    numbers[2].abs_()
    numbers[3] = -numbers[3].abs()
    numbers[4] *= 1e-6
    encoded = encode_q4_k(numbers)
    assert encoded.shape == (64, 144)
    decoded = gguf.quants.dequantize(encoded.numpy(), gguf.GGMLQuantizationType.Q4_K)
    found = torch.from_numpy(decoded).view_as(numbers)
    assert torch.equal(found[0], numbers[0])
    torch.testing.assert_close(found[1], numbers[1], rtol=1e-3, atol=0)
    for block in range(2, 64):
        if block != 4:  # float16 holds no smaller scales
            assert relative(found[block], numbers[block]) < 0.1, block
    plain = numbers.amax(2, keepdim=True) - numbers.amin(2, keepdim=True)
    rounded = ((numbers - numbers.amin(2, keepdim=True)) / plain * 15).round() * plain / 15
    rounded += numbers.amin(2, keepdim=True)
    assert relative(found[5:], numbers[5:]) < 1.1 * relative(rounded[5:], numbers[5:])


def test_fp8() -> None:
    weight = torch.randn(48, 96) * torch.rand(48, 1)
    weight[3] = 0
    tensors = fp8_tensors(weight)
    found = read(tensors, "fp8", 48, 96)
    # half a step of the last of 3 bits of mantissa, or of the smallest numbers
    smallest = weight.abs().amax(1, keepdim=True) / 448 / 1024
    assert ((found - weight).abs() <= 1.001 * torch.maximum(weight.abs() / 16, smallest)).all()
    assert relative(found, weight) < 0.04


def test_int4() -> None:
    weight = torch.randn(48, 256)
    weight[3, :128] = 0
    weight[4, 0] = 50.0  # an outlier takes its group's scale only
    tensors = int4_tensors(weight, 128)
    found = read(tensors, "int4", 48, 256)
    assert not found[3, :128].any()
    assert relative(found[5:], weight[5:]) < 0.12
    assert relative(found[4, 128:], weight[4, 128:]) < 0.15
    reach = torch.maximum(weight[5:].amax() / 7, -weight[5:].amin() / 8)
    whole = (weight[5:] / reach).round().clamp(-8, 7) * reach
    assert relative(found[5:], weight[5:]) < relative(whole, weight[5:])


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.1), ("int4", 0.25)])
def test_directories(kind: str, most: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(**WIDE))
    done = quantize(str(path), "--to", kind)
    assert done.exit_code == 0, done.output
    made = tmp_path / f"tiny-{kind}"
    content = json.loads((made / "config.json").read_text())["quantization_config"]
    assert content["quant_method"] == "compressed-tensors"
    assert relative(logits(made), logits(path)) < most
    assert f"tiny-{kind}: {'e4m3' if kind == 'fp8' else 'int4, a scale for each 64'}" in done.output
    assert "of it); perplexity of" in done.output and "%)" in done.output
    assert (made / "tokenizer.json").is_file()
    again = quantize(str(made), "--to", kind, "--out", "again")
    assert again.exit_code == 2 and "quantised already" in again.output


@pytest.mark.skipif(native() is None, reason="needs a C compiler")
@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.02), ("q4_k", 0.15)])
def test_files(kind: str, most: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(**WIDE))
    done = quantize(str(path), "--to", kind)
    assert done.exit_code == 0, done.output
    made = tmp_path / f"tiny-{kind}.gguf"
    before, after = open_gguf(path), open_gguf(made)
    skipped = ("GGUF.", "general.file_type")
    assert {k: v for k, v in after.metadata.items() if not k.startswith(skipped)} == {
        k: v for k, v in before.metadata.items() if not k.startswith(skipped)
    }
    kinds = {name: tensor.tensor_type.name for name, tensor in after.tensors.items()}
    assert kinds["output.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.attn_q.weight"] == kind.upper()
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0", "320 columns"
    assert kinds["output_norm.weight"] == "F32"
    assert relative(logits(made), logits(path)) < most
    assert made.stat().st_size < (0.4 if kind == "q8_0" else 0.35) * path.stat().st_size
    again = quantize(str(made), "--to", "q8_0", "--out", "again.gguf", "--no-perplexity")
    assert again.exit_code == 0 and "1.00 of it" in again.output, "no tensor is widened"


def test_perplexity_of_uniform_logits() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()

    class Words:
        def encode(self, text: str) -> list[int]:
            return [ord(x) for x in text]

    value, count = perplexity(model, Words(), "ab" * 100)
    assert math.isclose(value, 300, rel_tol=1e-4)
    assert count == 64, "the second half of one window of 128"
    with pytest.raises(ValueError, match="1 tokens, and 2 are needed"):
        perplexity(model, Words(), "a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "fp8"], "give a model"),
        (["some/model"], "--to must be one of q8_0, q4_k, fp8, int4"),
        (["some/model", "--to", "q5"], "--to must be one of"),
        (["some/model", "--to", "q4_k"], "from another one, with wider weights"),
        (["nothing.gguf", "--to", "q4_k"], "nothing.gguf"),
        (["x.gguf", "--to", "fp8", "--out", "."], "exists: give another --out"),
        (["x.gguf", "--to", "fp8", "--text", "no.txt"], "no.txt: No such file"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    done = quantize(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_the_text_is_the_example() -> None:
    example = Path(__file__).parents[3] / "examples" / "river.txt"
    assert TEXT.read_text() == example.read_text()
