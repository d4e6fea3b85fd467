"""Checkpoints in the quantised formats of others: what their numbers compute, or a refusal."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf_files import SIZES, tiny_llama  # noqa: E402
from quantised_files import FORMATS, FP8, INT4, compressed, write_checkpoint  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from anabranch import LLM, SamplingParams  # noqa: E402
from anabranch.llm.models import experts, load_model  # noqa: E402
from anabranch.llm.models.dummy_model import dummy_config  # noqa: E402
from anabranch.llm.models.fused_projections import (  # noqa: E402
    GatedMLP,
    gate_joined,
    join_projections,
)
from anabranch.llm.models.model_config import read_config, scheme_of  # noqa: E402
from anabranch.llm.models.quantised_linear import QuantisedLinear  # noqa: E402
from anabranch.llm.models.quantised_model import Checkpoint, load_quantised  # noqa: E402
from anabranch.llm.models.quantised_weight import QuantisedWeight  # noqa: E402
from anabranch.llm.models.random_codes import quantise_randomly  # noqa: E402
from anabranch.llm.models.weight_scheme import read_scheme  # noqa: E402

PROMPT = torch.tensor([[5, 17, 250, 3, 99, 1, 0, 42]])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(PROMPT.to(device), use_cache=False).logits.float().cpu()


def kept(directory: Path, dtype: torch.dtype = torch.float16) -> Any:
    """A model whose weights stay codes; without a GPU, kernels are interpreted."""
    config = read_config(directory / "config.json")
    scheme = scheme_of(config)
    assert scheme is not None
    options: Any = {"device": DEVICE, "dtype": dtype, "attn_implementation": "sdpa"}
    return load_quantised(directory, config, scheme, expand=False, **options).eval()


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, tiny_llama(), name)
    loaded = load_model(str(tmp_path), device="cpu").model
    assert torch.equal(logits(loaded), logits(written))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_kept(name: str, tmp_path: Path) -> None:
    """In joined projections, and with the gate in the feed-forward block."""
    written = write_checkpoint(tmp_path, tiny_llama(), name)
    expected, size = logits(written), logits(written).abs().max()
    model = kept(tmp_path)
    linears = [x for x in model.modules() if isinstance(x, QuantisedLinear)]
    assert len(linears) == 2 * 7
    weight, number = linears[0].weight, written.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(weight.float().cpu(), number.half().float(), rtol=1e-3, atol=0)
    assert (logits(model) - expected).abs().max() <= 0.01 * size
    joins = name != "gptq act order"  # columns in other orders
    assert join_projections(model) == 4 * joins
    assert gate_joined(model) == 2 * joins
    assert isinstance(model.model.layers[0].mlp, GatedMLP) == joins
    assert (logits(model) - expected).abs().max() <= 0.01 * size


@pytest.mark.parametrize("name", ["awq", "fp8 block", "int8"])
def test_the_engine_runs_them(name: str, tmp_path: Path) -> None:
    model = tiny_llama(initializer_range=0.4)
    written = write_checkpoint(tmp_path / "quantised", model, name, size=0.3)
    written.save_pretrained(tmp_path / "plain")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def tokens(folder: str, **options: Any) -> list[Any]:
        llm = LLM(str(tmp_path / folder), device="cpu", max_num_seqs=4, **options)
        return [x.outputs[0].token_ids for x in llm.generate([[5, 17, 250, 3], [8] * 20], params)]

    expected = tokens("plain")
    assert tokens("quantised") == expected
    assert tokens("quantised", speculative="ngram") == expected


def write_experts(directory: Path, name: str, *, sizes: dict[str, Any] | None = None) -> Any:
    """A Qwen3-MoE whose file has each expert's weights, and its model one weight for all."""
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **(sizes or {})}
    config = transformers.Qwen3MoeConfig(**{**SIZES, **own}, mlp_only_layers=[])
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    write_checkpoint(directory, model, name)
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(1)
    for index, layer in enumerate(model.model.layers):
        parent, experts = f"model.layers.{index}.mlp.experts", layer.mlp.experts
        for key in ("gate_up_proj", "down_proj"):
            del tensors[f"{parent}.{key}"]
        n, k = experts.down_proj.shape[2], experts.down_proj.shape[1]
        for expert in range(config.num_experts):
            for part, shape in {"gate": (n, k), "up": (n, k), "down": (k, n)}.items():
                written, numbers = FORMATS[name][1](rng, *shape)
                scale = next(key for key in written if "scale" in key)
                written[scale] = written[scale] / 16
                for key, value in written.items():
                    tensors[f"{parent}.{expert}.{part}_proj.{key}"] = value
                weight = experts.down_proj if part == "down" else experts.gate_up_proj
                rows = slice(n, 2 * n) if part == "up" else slice(0, shape[0])
                with torch.no_grad():
                    weight[expert, rows] = torch.from_numpy(numbers / 16).float()
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return model


def test_experts_are_expanded(tmp_path: Path) -> None:
    model = write_experts(tmp_path, "fp8 channel")
    loaded = load_model(str(tmp_path), device="cpu").model
    torch.testing.assert_close(logits(loaded), logits(model))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.3\.up_proj"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("name", "width", "group_n"),
    [("fp8 channel", 64, 1), ("fp8 block", 128, 128), ("fp8 block", 64, 1), ("int4", 64, 1)],
)
def test_experts_stay_codes(
    name: str, width: int, group_n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one prompt and of one token; blocks may end within an expert."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": width, "num_hidden_layers": 1}
    written = write_experts(tmp_path, name, sizes=sizes)
    model = kept(tmp_path)
    monkeypatch.setattr(experts, "is_on_gpu", lambda model: True)
    assert experts.use_experts(model)
    for layer in model.model.layers:
        assert isinstance(layer.mlp.experts.gate_up_proj, QuantisedWeight)
        assert layer.mlp.experts.gate_up_proj.constants.group_n == group_n
    for ids in (PROMPT, PROMPT[:, :1]):
        with torch.inference_mode():
            found = model(ids.to(DEVICE), use_cache=False).logits.float().cpu()
            expected = written(ids, use_cache=False).logits
        assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


def test_experts_of_several_formats_are_expanded(tmp_path: Path) -> None:
    written = write_experts(tmp_path, "fp8 channel")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.up_proj"
    number = tensors.pop(f"{name}.weight").float() * tensors.pop(f"{name}.weight_scale")
    tensors[f"{name}.weight"] = number
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = (layer.mlp.experts for layer in kept(tmp_path).model.layers)
    expected = written.model.layers[0].mlp.experts.gate_up_proj
    torch.testing.assert_close(first.gate_up_proj.float().cpu(), expected.half().float())
    assert isinstance(second.gate_up_proj, QuantisedWeight)


def resize(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].flatten()[:-1].contiguous()


NAME = "model.layers.1.mlp.up_proj"
DAMAGED = [
    *((name, "no scale") for name in FORMATS),
    *((name, "short") for name in FORMATS),
    ("awq", "zeros"),
    ("gptq", "groups"),
    ("int4", "shape"),
    ("fp8 channel", "infinite"),
    ("int8", "floats"),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_damaged_layers_are_named(name: str, damage: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_llama(), name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    own = {key for key in tensors if key.startswith(NAME)}
    scale = next(key for key in own if "scale" in key and "input" not in key)
    codes = next(
        key for key in own if key.rpartition(".")[2] in ("qweight", "weight_packed", "weight")
    )
    if damage == "no scale":
        del tensors[scale]
    elif damage == "short":
        resize(tensors, codes)
    elif damage == "zeros":
        resize(tensors, f"{NAME}.qzeros")
    elif damage == "groups":
        tensors[f"{NAME}.g_idx"][0] = 1
    elif damage == "shape":
        tensors[f"{NAME}.weight_shape"] = torch.tensor([96, 65])
    elif damage == "infinite":
        tensors[scale][3] = torch.inf
    elif damage == "floats":
        tensors[codes] = tensors[codes].float()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=NAME.replace(".", r"\.")):
        load_model(str(tmp_path), device="cpu")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Whatever byte of the header is changed, or wherever the file ends."""
    write_checkpoint(tmp_path, tiny_llama(), "int4")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    rng, refused = np.random.default_rng(0), 0
    for turn in range(60):
        damaged = bytearray(content)
        if turn % 3 == 0:
            damaged = damaged[: rng.integers(0, len(damaged))]
        else:
            damaged[rng.integers(0, header + 8)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load_model(str(tmp_path), device="cpu")
        except ValueError as error:
            refused += 1
            assert str(tmp_path) in str(error)
    assert refused >= 40


def test_an_index_names_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_llama(), "int4")
    tensors = load_file(tmp_path / "model.safetensors")
    expected = logits(load_model(str(tmp_path), device="cpu").model)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    where = {key: file for file, keys in halves.items() for key in keys}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert torch.equal(logits(load_model(str(tmp_path), device="cpu").model), expected)
    with ExitStack() as stack:
        assert Checkpoint(tmp_path, stack).num_bytes == sum(
            (tmp_path / file).stat().st_size for file in halves
        )
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks b\.safetensors"):
        load_model(str(tmp_path), device="cpu")
    index.write_text(json.dumps({"weight_map": {"x": "../b.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks \.\./b\.safetensors"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'; supported are"),
        ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "in the layout gemv"),
        ({"quant_method": "gptq", "bits": 8}, "gptq with 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "in the layout marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be"),
        ({"quant_method": "gptq"}, "gptq is not valid: .*bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8 is not valid: .*two integers"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scales of ue8m0"),
        ({"quant_method": "compressed-tensors"}, "not valid: 'config_groups'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "has no config_groups"),
        (compressed("nvfp4-pack-quantized", {**FP8, "num_bits": 4}), "float4 in the layout 'nvfp4"),
        (compressed("marlin-24", INT4), "int4 in the layout 'marlin-24'"),
        (compressed("pack-quantized", {**INT4, "num_bits": 3}), "as int3"),
        (compressed("pack-quantized", {**INT4, "strategy": "row"}), "strategy 'row'"),
        (
            {**compressed("pack-quantized", INT4), "sparsity_config": {"format": "2:4"}},
            "with a sparsity_config",
        ),
        ("fp8", "must be an object, got 'fp8'"),
    ],
)
def test_other_formats_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": content}))
    with pytest.raises(ValueError, match=message) as raised:
        read_config(path)
    assert str(path) in str(raised.value)


def test_ranks_are_refused_where_codes_are_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_llama(), "int4")
    config = read_config(tmp_path / "config.json")
    scheme = scheme_of(config)
    assert scheme is not None
    options: Any = {"device": "cpu", "dtype": torch.float16, "attn_implementation": "sdpa"}
    with pytest.raises(ValueError, match="not cut over ranks"):
        load_quantised(tmp_path, config, scheme, expand=False, cut=lambda _: None, **options)


@pytest.mark.parametrize("name", ["llama-3.1-8b-fp8", "llama-3.1-8b-int4"])
def test_dummies_have_codes(name: str) -> None:
    """On a GPU; here in the format of the configuration, for a smaller model."""
    scheme = scheme_of(dummy_config(name))
    assert scheme is not None and scheme.ignored == ("lm_head",)
    model = tiny_llama(hidden_size=128, head_dim=32, intermediate_size=256).half()
    assert quantise_randomly(model, scheme) == 2 * 7
    assert type(model.lm_head) is torch.nn.Linear
    layer = model.model.layers[0].mlp.down_proj
    assert layer.quantised.constants.kind == name.rpartition("-")[2]
    assert 0.01 < layer.weight.float().std() < 0.04


def test_dummies_have_experts_of_codes() -> None:
    scheme = scheme_of(dummy_config("deepseek-v2-lite-fp8"))
    assert scheme is not None and (scheme.group_n, scheme.group_k) == (128, 128)
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
    config = transformers.Qwen3MoeConfig(**SIZES, **sizes, mlp_only_layers=[])
    model = transformers.Qwen3MoeForCausalLM(config).half()
    assert quantise_randomly(model, scheme) == 2 * 4
    for layer in model.model.layers:
        assert layer.mlp.experts.gate_up_proj.n == 2 * 2 * 128
        assert 0.01 < layer.mlp.experts.down_proj.expanded().float().std() < 0.04


def test_settings_of_schemes() -> None:
    scheme = read_scheme(FORMATS["gptq"][0], "x")
    assert (scheme.method, scheme.group_k, scheme.zeros_less_one) == ("gptq", 32, True)
    assert not read_scheme(FORMATS["gptq v2"][0], "x").zeros_less_one
    assert read_scheme(FORMATS["fp8 channel"][0], "x").fp8_inputs
    assert read_scheme(FORMATS["fp8 block"][0], "x").fp8_inputs
    assert not read_scheme(compressed("float-quantized", FP8), "x").fp8_inputs
    assert read_scheme({"quant_method": "awq", "bits": 4, "group_size": -1}, "x").group_k is None
