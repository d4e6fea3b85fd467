"""Models of checkpoints with a `quantization_config`: kept quantised on a GPU, else expanded."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from anabranch.llm.models.expert_weights import (
    EXPERT_PARTS,
    by_output,
    join_experts,
    plain_experts,
    set_quantised_experts,
)
from anabranch.llm.models.model_config import check_fits, empty_model
from anabranch.llm.models.quantised_linear import set_quantised
from anabranch.llm.models.quantised_tensors import is_quantised, read_codes
from anabranch.llm.models.quantised_weight import QuantisedWeight
from anabranch.llm.models.weight_scheme import WeightScheme

EXPANDED = ("kv_b_proj",)  # whose weights are read by other kernels than products
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
        experts = {name: x for name, x in plain_experts(self.model).items() if self._keeps(name)}
        sizes = {
            name: [module.get_parameter(key).shape for key in EXPERT_PARTS]
            for name, module in experts.items()
        }
        for module in linears.values():
            module.weight = None  # pyright: ignore[reportAttributeAccessIssue]
        for module in experts.values():
            for key in EXPERT_PARTS:
                module.register_parameter(key, None)
        for module in (*linears.values(), *experts.values()):
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.model.to_empty(device=self.device)
        self.model.initialize_weights()  # buffers such as rotary frequencies
        for name, linear in linears.items():
            self._set_linear(name, linear)
        for name, module in experts.items():
            self._set_experts(name, module, *sizes[name])
        self.model.tie_weights()
        self._set_plain(linears)

    def _set_linear(self, name: str, linear: nn.Linear) -> None:
        weight = self._weight(name, linear.out_features, linear.in_features)
        if self.expand or name.rpartition(".")[2] in EXPANDED:
            linear.weight = nn.Parameter(weight.expanded(), requires_grad=False)
        else:
            set_quantised(linear, weight)

    def _keeps(self, experts: str) -> bool:
        """Whether the experts of a layer may stay quantised: the first of them is."""
        return not self.expand and all(
            f"{experts}.0.{part}" in self.quantised
            for parts in EXPERT_PARTS.values()
            for part in parts
        )

    def _set_experts(self, name: str, module: nn.Module, *shapes: torch.Size) -> None:
        """As codes, or, where their formats differ or have no kernels, as room for numbers."""
        joined = [
            self._join_experts(name, parts, shape)
            for parts, shape in zip(EXPERT_PARTS.values(), shapes, strict=True)
        ]
        gate_up, down = joined
        if gate_up is not None and down is not None:
            set_quantised_experts(module, gate_up, down)
            return
        for key, shape in zip(EXPERT_PARTS, shapes, strict=True):
            room = torch.empty(shape, dtype=self.dtype, device=self.device)
            setattr(module, key, nn.Parameter(room, requires_grad=False))

    def _join_experts(
        self, name: str, parts: tuple[str, ...], shape: torch.Size
    ) -> QuantisedWeight | None:
        num_experts, rows, k = shape
        names = [f"{name}.{expert}.{part}" for expert in range(num_experts) for part in parts]
        if not all(each in self.quantised for each in names):
            return None
        return join_experts(
            [self._weight(each, rows // len(parts), k, whole=True) for each in names]
        )

    def _weight(self, name: str, n: int, k: int, *, whole: bool = False) -> QuantisedWeight:
        """Of a layer; `whole` with groups that end with it."""
        own = self.quantised[name]
        tensors = {each: self.checkpoint[f"{name}.{each}"].to(self.device) for each in own}
        try:
            codes = read_codes(tensors, self.scheme, n, k)
            codes = by_output(codes) if whole else codes
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
            parent = name.rpartition(".")[0]
            if name in kept or isinstance(self.model.get_submodule(parent), QuantisedWeight):
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
        """Expanded, into the weight of all."""
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


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain linear layers of a model by name."""
    modules = cast("list[tuple[str, nn.Module]]", list(cast("Any", model).named_modules()))
    return {name: module for name, module in modules if type(module) is nn.Linear}
