"""Launches on meta tensors of what models need beside attention, for `compile_cases.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from anabranch.kernels.layers.absorb_queries import absorb_queries
from anabranch.kernels.layers.expand_codes import expand_codes
from anabranch.kernels.layers.expert_row import ExpertWeight, gate_row, project_row
from anabranch.kernels.layers.gate_outputs import gate_outputs
from anabranch.kernels.layers.latent_inputs import latent_inputs
from anabranch.kernels.layers.linear import linear
from anabranch.kernels.layers.linear_config import LinearConfig, every_linear_config, fit_linear
from anabranch.kernels.layers.quantise_rows import quantise_rows
from anabranch.kernels.layers.quantised_config import (
    SCALED_TILES,
    CodeConstants,
    QuantisedConfig,
    code_tiles,
    every_code_experts,
    every_config,
    fit_quantised,
)
from anabranch.kernels.layers.quantised_experts import (
    gate_quantised_experts,
    project_quantised_experts,
)
from anabranch.kernels.layers.quantised_product import CodeArguments, quantised_product
from anabranch.kernels.layers.route_config import every_route_case, fit_route, select_route
from anabranch.kernels.layers.route_experts import num_places, route_experts
from anabranch.kernels.layers.scaled_product import scaled_product

Case = tuple[str, Callable[[], object]]


def absorb_queries_cases(shared_bytes: int) -> Iterator[Case]:
    """A launch_case on meta tensors."""

    def launch_case() -> None:
        q, w, absorbed = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((64, 16, 192), (16, 256, 512), (64, 16, 576))
        )
        absorb_queries(q, w, absorbed, overlap=shared_bytes >= 227 * 1024)

    yield "64 tokens", launch_case


def expand_codes_cases(shared_bytes: int) -> Iterator[Case]:
    """Launches on meta tensors, one a format."""
    new, packed = partial(torch.empty, device="meta"), shared_bytes > 64 * 1024

    def launch_case(constants: CodeConstants, dtype: torch.dtype) -> None:
        scales = new(4096 // constants.group_k, 4096 // constants.group_n)
        words = new(4096, 4096 // constants.parts, dtype=torch.int16)
        zeros = scales if constants.kind == "int4" else None
        expand_codes(CodeArguments(words, scales, zeros), new(4096, 4096, dtype=dtype), constants)

    yield "fp8", partial(launch_case, CodeConstants("fp8", 128, 128, packed), torch.bfloat16)
    yield "int8", partial(launch_case, CodeConstants("int8", 1, 4096, packed), torch.bfloat16)
    yield "int4", partial(launch_case, CodeConstants("int4", 1, 128, packed), torch.float16)
    yield "groups of 16", partial(launch_case, CodeConstants("int8", 1, 16, packed), torch.bfloat16)
    yield "groups of 32", partial(launch_case, CodeConstants("int4", 1, 32, packed), torch.bfloat16)


def expert_row_cases(shared_bytes: int) -> Iterator[Case]:
    """Launches of both products on meta tensors."""
    new, overlap = partial(torch.empty, device="meta"), shared_bytes >= 227 * 1024
    brain, packed = torch.bfloat16, shared_bytes > 64 * 1024  # NVIDIA's instructions
    k, n, top_k = 2048, 1408, 6

    def weight(rows: int, columns: int, constants: CodeConstants | None) -> ExpertWeight:
        if constants is None:
            return ExpertWeight(new(64, rows, columns, dtype=brain))
        width = -(-columns // constants.run) * constants.words
        scales = new(-(-columns // constants.group_k), 64 * rows // constants.group_n)
        zeros = scales.half() if constants.short else None
        return ExpertWeight(new(64 * rows, width, dtype=torch.int16), scales, zeros)

    def launch_case(constants: CodeConstants | None) -> None:
        experts, weights = new(top_k, dtype=torch.int32), new(top_k)
        x, inner = new(k, dtype=brain), new(top_k, n, dtype=brain)
        gate_row(x, weight(2 * n, k, constants), experts, inner, constants, overlap=overlap)
        given = inner, weight(k, n, constants), experts, weights, x, constants
        project_row(*given, overlap=overlap)

    yield "6 experts", partial(launch_case, None)
    yield "fp8 in blocks", partial(launch_case, CodeConstants("fp8", 128, 128, packed))
    yield "fp8", partial(launch_case, CodeConstants("fp8", 1, 2048, packed))
    yield "int4 in groups of 32", partial(launch_case, CodeConstants("int4", 1, 32, packed))


def gate_outputs_cases(shared_bytes: int) -> Iterator[Case]:
    """A launch on meta tensors."""
    del shared_bytes

    def launch_case() -> None:
        joined = torch.empty(64, 28672, dtype=torch.bfloat16, device="meta")
        gate_outputs(joined, torch.empty(64, 14336, dtype=torch.bfloat16, device="meta"))

    yield "14336 outputs", launch_case


def latent_inputs_cases(shared_bytes: int) -> Iterator[Case]:
    """A launch on meta tensors."""

    def launch_case() -> None:
        joined = torch.empty(4, 16 * 192 + 576, dtype=torch.bfloat16, device="meta")
        q, latent = joined[:, : 16 * 192].view(4, 16, 192), joined[:, 16 * 192 :]
        cos = torch.empty(4, 32, device="meta")
        given = q, latent, cos, cos, joined[0, :512]
        written = torch.empty_like(q), torch.empty_like(latent)
        overlap = shared_bytes >= 227 * 1024
        latent_inputs(*given, *written, epsilon=1e-6, neighbours=True, overlap=overlap)

    yield "16 heads", launch_case


def linear_cases(shared_bytes: int) -> Iterator[Case]:
    """Launches on meta tensors that cover the configurations."""
    hopper = shared_bytes >= 227 * 1024

    def launch_case(
        config: LinearConfig, dtype: torch.dtype, *, biased: bool, gated: bool
    ) -> object:
        x, w, y = (
            torch.empty(shape, dtype=dtype, device="meta") for shape in (4096, (8192, 4096), 4096)
        )
        bias = y if biased else None
        return linear(x, w, bias, y, fit_linear(config, hopper=hopper), gated=gated)

    for config in every_linear_config():
        name = f"{config.block_n} x {config.block_k}"
        case = partial(launch_case, config, torch.bfloat16, biased=False)
        yield f"{name} bfloat16", partial(case, gated=False)
        yield f"{name} bfloat16 gated", partial(case, gated=True)
        case = partial(launch_case, config, torch.float16, biased=True, gated=False)
        yield f"{name} float16 bias", case


def quantise_rows_cases(shared_bytes: int) -> Iterator[Case]:
    """A launch on meta tensors."""

    def launch_case(*sizes: int) -> None:
        x = torch.empty(64, 14336, dtype=torch.bfloat16, device="meta")
        words = torch.empty(64, 7168, dtype=torch.int16, device="meta")
        scales, overlap = torch.empty(sizes, device="meta"), shared_bytes >= 227 * 1024
        quantise_rows(x, words, scales, overlap=overlap)

    yield "14336 columns", partial(launch_case, 64)
    yield "14336 columns by run", partial(launch_case, 112, 64)


def quantised_experts_cases(shared_bytes: int) -> Iterator[Case]:
    """Every tile on meta tensors, both products of DeepSeek-V2-Lite, and other formats."""
    new, packed = partial(torch.empty, device="meta"), shared_bytes > 64 * 1024
    hopper = shared_bytes >= 227 * 1024

    def launch_case(config: QuantisedConfig, constants: CodeConstants, *, gated: bool) -> None:
        config = fit_quantised(config, constants, shared_bytes=shared_bytes, hopper=hopper)
        n, k = (1408, 2048) if gated else (2048, 1408)
        rows, columns = 64 * n * (2 if gated else 1), -(-k // constants.run) * constants.run
        words = new(rows, columns // constants.parts, dtype=torch.int16)
        scales = new(-(-k // constants.group_k), rows // constants.group_n)
        x, y = (new(*shape, dtype=torch.bfloat16) for shape in ((384, k), (384, n)))
        weight, order = CodeArguments(words, scales, None), new(384, dtype=torch.int32)
        given = x, weight, order, new(65, dtype=torch.int32)
        if gated:
            gate_quantised_experts(*given, y, constants, config)
        else:
            project_quantised_experts(*given, new(384), y, constants, config)

    formats = {
        "fp8 in blocks": CodeConstants("fp8", 128, 128, packed),
        "fp8": CodeConstants("fp8", 1, 2048, packed),
        "int4": CodeConstants("int4", 1, 128, packed),
        "int4 in groups of 32": CodeConstants("int4", 1, 32, packed),
    }
    for kind, constants in formats.items():
        for config in every_code_experts(constants):
            case = partial(launch_case, config, constants)
            yield f"{config.block_m} rows, {kind}, gated", partial(case, gated=True)
            yield f"{config.block_m} rows, {kind}", partial(case, gated=False)


def quantised_product_cases(shared_bytes: int) -> Iterator[Case]:
    """Launches on meta tensors that cover the configurations and the formats."""
    new = partial(torch.empty, device="meta")

    hopper, packed = shared_bytes >= 227 * 1024, shared_bytes > 64 * 1024  # NVIDIA's instructions

    def launch_case(
        config: QuantisedConfig, constants: CodeConstants, dtype: torch.dtype, zeros: bool
    ) -> None:
        config = fit_quantised(config, constants, shared_bytes=shared_bytes, hopper=hopper)
        m, n, k = config.block_m, 4096, 4096
        words = new(n, k // constants.parts, dtype=torch.int16)
        scales = new(-(-k // constants.group_k), n // constants.group_n)
        weight = CodeArguments(words, scales, scales if zeros else None)
        sums = new(config.splits, m, n) if config.splits > 1 else None
        x, y, counters = new(m, k, dtype=dtype), new(m, n, dtype=dtype), new(64, dtype=torch.int32)
        quantised_product(x, weight, None, y, sums, counters, constants, config)

    formats = {
        "fp8": CodeConstants("fp8", 1, 4096, packed),
        "fp8 in blocks": CodeConstants("fp8", 128, 128, packed),
        "int8": CodeConstants("int8", 1, 4096, packed),
        "int4": CodeConstants("int4", 1, 128, packed),
        "int4 in groups of 32": CodeConstants("int4", 1, 32, packed),
        "int8 in groups of 16": CodeConstants("int8", 1, 16, packed),
    }
    for kind, constants in formats.items():
        for config in every_config(*code_tiles(constants)):
            name = f"{config.block_m} rows, {config.block_n} outputs, {config.splits} splits"
            yield f"{name}, {kind}", partial(launch_case, config, constants, torch.bfloat16, False)
    wide = every_config(*code_tiles(formats["int4 in groups of 32"]))[-1]
    for kind in ("int4 in groups of 32", "int8 in groups of 16"):
        case = partial(launch_case, wide, formats[kind], torch.bfloat16, True)
        yield f"{kind} float zeros", case
    for kind in ("fp8", "int4", "int4 in groups of 32"):
        config = every_config(*code_tiles(formats[kind]))[0]
        case = partial(launch_case, config, formats[kind], torch.float16, kind != "fp8")
        yield f"{kind} float16", case


def route_experts_cases(shared_bytes: int) -> Iterator[Case]:
    """Launches on meta tensors that cover the configurations."""
    hopper = shared_bytes >= 227 * 1024

    def launch_case(num_tokens: int, num_experts: int, k: int, num_groups: int) -> object:
        places = num_places(num_experts, num_groups)
        config = fit_route(
            select_route(num_tokens, places, k),
            itemsize=2,
            shared_bytes=shared_bytes,
            hopper=hopper,
        )
        x, w = (
            torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
            for rows in (num_tokens, num_experts)
        )
        grouped = num_groups > 1
        bias = torch.empty(num_experts, device="meta") if grouped else None
        experts = torch.empty(num_tokens, 8, dtype=torch.int32, device="meta")
        groups = {"num_groups": num_groups, "top_groups": 4 if grouped else 1}
        scores = {"sigmoid": grouped, "normalised": grouped, "scale": 2.5}
        written = experts, experts.float()
        return route_experts(x, w, bias, None, *written, config, **groups, **scores)

    for num_tokens, num_experts, k in every_route_case():
        groups = 8 if num_experts > 64 else 1
        case = partial(launch_case, num_tokens, num_experts, k, groups)
        yield f"{num_tokens} tokens, {num_experts} experts", case


def scaled_product_cases(shared_bytes: int) -> Iterator[Case]:
    """Launches on meta tensors that cover the configurations, which are Hopper's."""
    del shared_bytes
    new = partial(torch.empty, device="meta")

    def launch_case(config: QuantisedConfig) -> None:
        m, n, k = config.block_m, 4096, 4096
        x, w = (new(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n))
        sums = new(config.splits, m, n) if config.splits > 1 else None
        y, counters = new(m, n, dtype=torch.bfloat16), new(64, dtype=torch.int32)
        scaled_product(x, new(m), w, new(1, n), None, y, sums, counters, config)

    for config in every_config(SCALED_TILES):
        name = f"{config.block_m} rows, {config.block_n} outputs, {config.splits} splits"
        yield name, partial(launch_case, config)


LAYERS = "anabranch.kernels.layers"
LAYER_CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    f"{LAYERS}.absorb_queries": absorb_queries_cases,
    f"{LAYERS}.expand_codes": expand_codes_cases,
    f"{LAYERS}.expert_row": expert_row_cases,
    f"{LAYERS}.gate_outputs": gate_outputs_cases,
    f"{LAYERS}.latent_inputs": latent_inputs_cases,
    f"{LAYERS}.linear": linear_cases,
    f"{LAYERS}.quantise_rows": quantise_rows_cases,
    f"{LAYERS}.quantised_experts": quantised_experts_cases,
    f"{LAYERS}.quantised_product": quantised_product_cases,
    f"{LAYERS}.route_experts": route_experts_cases,
    f"{LAYERS}.scaled_product": scaled_product_cases,
}
