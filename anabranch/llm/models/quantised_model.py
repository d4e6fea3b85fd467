"""Models of checkpoints with a `quantization_config`: kept quantised on a GPU, else expanded."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from anabranch.llm.models.model_config import check_fits, empty_model
from anabranch.llm.models.quantised_linear import set_quantised
from anabranch.llm.models.quantised_tensors import is_quantised, read_codes
from anabranch.llm.models.quantised_weight import FP8, INT4, Codes, QuantisedWeight
from anabranch.llm.models.weight_scheme import WeightScheme

EXPANDED = ("kv_b_proj",)  # whose weights are read by other kernels than products
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
log = logging.getLogger("anabranch")


def load_quantised(
    directory: Path,
    config: PreTrainedConfig,
    scheme: WeightScheme,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attn_implementation: str,
    cut: Callable[[PreTrainedModel], object] | None = None,
    expand: bool | None = None,
) -> PreTrainedModel:
    """The model of a directory. By default its weights are expanded on devices other than GPUs."""
    device = torch.device(device)
    expand = device.type != "cuda" if expand is None else expand
    if cut is not None and not expand:
        raise ValueError(
            f"weights quantised by {scheme.method} are loaded by one GPU, and not cut over ranks"
        )
    if expand:
        log.warning("%s: weights in %s are expanded to %s", directory.name, scheme.kind, dtype)
    with ExitStack() as stack:
        checkpoint = Checkpoint(directory, stack)
        check_fits(checkpoint.num_bytes, device)
        model = empty_model(plain_config(config), dtype, attn_implementation)
        loader = _Loader(model, checkpoint, scheme, device, dtype, expand)
        try:
            loader.load()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ValueError(f"the weights in {directory} cannot be read: {error}") from error
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if cut is not None:
        cut(model)
    return model


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that says nothing of quantised weights."""
    plain: Any = deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


class Checkpoint:
    """Tensors of a directory by name, read when asked for."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        self._files: dict[str, Any] = {}
        self.num_bytes = 0
        for name in names:
            path = directory / name
            if path.parent != directory or not path.is_file():
                raise ValueError(f"{directory} lacks {name}, which its index names")
            try:
                file = stack.enter_context(cast("Any", safe_open)(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
            self.num_bytes += path.stat().st_size

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._files)

    def layers(self) -> dict[str, set[str]]:
        """Names of tensors by what stands before their last dot."""
        found: dict[str, set[str]] = {}
        for name in self._files:
            parent, _, own = name.rpartition(".")
            found.setdefault(parent, set()).add(own)
        return found


class _Loader:
    """One pass over the modules of an empty model."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        scheme: WeightScheme,
        device: torch.device,
        dtype: torch.dtype,
        expand: bool,
    ) -> None:
        self.model, self.checkpoint, self.scheme = model, checkpoint, scheme
        self.device, self.dtype, self.expand = device, dtype, expand
        layers = checkpoint.layers()
        self.quantised = {name: own for name, own in layers.items() if is_quantised(own)}

    def load(self) -> None:
        linears = {
            name: x for name, x in linear_layers(self.model).items() if name in self.quantised
        }
        for module in linears.values():
            module.weight = None  # pyright: ignore[reportAttributeAccessIssue]
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.model.to_empty(device=self.device)
        self.model.initialize_weights()  # buffers such as rotary frequencies
        for name, linear in linears.items():
            self._set_linear(name, linear)
        self.model.tie_weights()
        self._set_plain(linears)

    def _set_linear(self, name: str, linear: nn.Linear) -> None:
        weight = self._weight(name, linear.out_features, linear.in_features)
        if self.expand or name.rpartition(".")[2] in EXPANDED:
            linear.weight = nn.Parameter(weight.expanded(), requires_grad=False)
        else:
            set_quantised(linear, weight)

    def _weight(self, name: str, n: int, k: int) -> QuantisedWeight:
        own = self.quantised[name]
        tensors = {each: self.checkpoint[f"{name}.{each}"].to(self.device) for each in own}
        try:
            codes = read_codes(tensors, self.scheme, n, k)
            return QuantisedWeight(codes, dtype=self.dtype, fp8_inputs=self.scheme.fp8_inputs)
        except ValueError as error:
            raise ValueError(f"{self.checkpoint.directory}: {name}: {error}") from error

    @torch.no_grad()
    def _set_plain(self, linears: dict[str, nn.Linear]) -> None:
        """Copy all that is not quantised, and make sure that nothing is left out."""
        tied: set[str] = set(cast("Any", self.model).all_tied_weights_keys or ())
        kept = {f"{name}.weight" for name in linears}
        missing: list[str] = []
        for name, tensor in self.model.state_dict().items():
            if name in kept or ".quantised." in name:
                continue
            if name in self.checkpoint:
                self._copy(name, tensor, self.checkpoint[name])
            elif self._has_experts(name):
                self._copy_experts(name, tensor)
            elif name not in tied:
                missing.append(name)
        if missing:
            raise ValueError(
                f"{self.checkpoint.directory} lacks {len(missing)} weights, such as {missing[0]}"
            )

    def _copy(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if values.shape != tensor.shape or not values.is_floating_point() or values.itemsize < 2:
            raise ValueError(
                f"{self.checkpoint.directory}: {name} must be floats {list(tensor.shape)}, "
                f"got {values.dtype} {list(values.shape)}"
            )
        tensor.copy_(values)

    def _has_experts(self, name: str) -> bool:
        """Whether a weight of all experts lies in the file as one of each."""
        parent, _, own = name.rpartition(".")
        first = EXPERT_PARTS.get(own, ("",))[0]
        each = f"{parent}.0.{first}"
        return each in self.quantised or f"{each}.weight" in self.checkpoint

    def _copy_experts(self, name: str, tensor: torch.Tensor) -> None:
        """Experts are mixed by kernels that read 16 bits."""
        parent, _, own = name.rpartition(".")
        n, k = tensor.shape[1] // len(EXPERT_PARTS[own]), tensor.shape[2]
        for expert in range(len(tensor)):
            for place, part in enumerate(EXPERT_PARTS[own]):
                source, target = f"{parent}.{expert}.{part}", tensor[expert, place * n :][:n]
                if source in self.quantised:
                    target.copy_(self._weight(source, n, k).expanded())
                elif f"{source}.weight" in self.checkpoint:
                    self._copy(source, target, self.checkpoint[f"{source}.weight"])
                else:
                    raise ValueError(f"{self.checkpoint.directory} lacks {source}")


def quantise_randomly(model: nn.Module, scheme: WeightScheme) -> int:
    """Give the linear layers of a model random codes of a format, in place; how many."""
    count = 0
    for name, module in linear_layers(model).items():
        if _is_ignored(name, scheme):
            continue
        weight = module.weight
        weights = draw_codes(scheme, *weight.shape, device=weight.device)
        set_quantised(
            module, QuantisedWeight(weights, dtype=weight.dtype, fp8_inputs=scheme.fp8_inputs)
        )
        count += 1
    return count


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain linear layers of a model by name."""
    modules = cast("list[tuple[str, nn.Module]]", list(cast("Any", model).named_modules()))
    return {name: module for name, module in modules if type(module) is nn.Linear}


def draw_codes(scheme: WeightScheme, n: int, k: int, *, device: torch.device) -> Codes:
    """Random codes and scales of a format, with numbers of about 0.02."""
    if scheme.kind == FP8:
        codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        size = 0.02
    else:
        top = 16 if scheme.kind == INT4 else 256
        codes = torch.randint(top, (n, k), device=device, dtype=torch.uint8)
        size = 0.07 / top
    group_n, group_k = scheme.group_n, scheme.group_k or k
    scales = torch.rand(-(-n // group_n), -(-k // group_k), device=device)
    scales = size * (scales + 0.5)
    if scheme.kind == INT4:
        scales = scales.bfloat16()
    return Codes(scheme.kind, codes, scales, group_n=group_n, group_k=scheme.group_k)


def _is_ignored(name: str, scheme: WeightScheme) -> bool:
    """Whether a configuration leaves a linear layer as it is."""
    for pattern in scheme.ignored:
        if pattern.startswith("re:") and re.match(pattern[3:], name):
            return True
        if name == pattern or name.startswith(f"{pattern}."):
            return True
    return name.rpartition(".")[2] == "lm_head"
