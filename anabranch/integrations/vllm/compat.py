"""What differs between the versions of vLLM that the backend works with: 0.26 to 0.32.

KV caches are [pages, kv heads, keys of a page, 2 * head dim] in all of them. Up to 0.26 a backend
declares that shape and its order in memory; later versions derive both from the layer.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 32)
_NHD, _HND = (0, 2, 1, 3), (0, 1, 2, 3)


def check_version(version: str) -> None:
    """Refuse a version of vLLM whose interface is not known to fit."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not (len(numbers) == 2 and OLDEST <= numbers <= NEWEST):
        raise ValueError(
            f"vLLM {version} is not supported: anabranch's backend works with "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )


def attention_interface() -> Any:
    """The module of vLLM's base classes, if the version is supported."""
    vllm: Any = import_module("vllm")
    check_version(vllm.__version__)
    return import_module("vllm.v1.attention.backend")


def latent_interface() -> Any:
    """The module of vLLM's latent attention, if the version is supported."""
    attention_interface()
    return import_module("vllm.model_executor.layers.attention.mla_attention")


def describe_constants() -> None:
    """Let Triton describe our kernels to listeners of its compiler, of which vLLM is one.

    Triton writes a kernel's constants as JSON for them, which takes plain values only; ours are
    dataclasses, and go in as their text.
    """
    if find_spec("triton") is None:
        return
    jit: Any = import_module("triton.runtime.jit")
    serialize = jit.serialize_specialization_data
    if getattr(serialize, "takes_dataclasses", False):
        return

    def with_text(name: str, signature: Any, constants: dict[Any, Any], *others: Any) -> Any:
        plain = {place: str(x) if is_dataclass(x) else x for place, x in constants.items()}
        return serialize(name, signature, plain, *others)

    with_text.takes_dataclasses = True  # pyright: ignore[reportFunctionMemberAccess]
    jit.serialize_specialization_data = with_text


def combine_across_ranks(parallel_config: Any) -> Any:
    """vLLM's merge over decode context parallel ranks; a function of out, lse and group."""
    name = "dcp_a2a_lse_reduce" if parallel_config.dcp_comm_backend == "a2a" else "cp_lse_ag_out_rs"
    for module in ("dcp", "dcp_alltoall", "common"):  # one module since 0.27
        try:
            found: Any = import_module(f"vllm.v1.attention.ops.{module}")
        except ModuleNotFoundError:
            continue
        if hasattr(found, name):
            return getattr(found, name)
    raise ValueError(f"this version of vLLM has no {name} to merge states across ranks with")


class DeclaredCache:
    """The cache as backends declare it up to vLLM 0.26; later versions do not ask."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Keys and values side by side in the last dimension."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order in memory that vLLM is set to; attend reads either."""
        layouts: Any = import_module("vllm.v1.attention.backends.utils")
        order = _NHD if layouts.get_kv_cache_layout() == "NHD" else _HND
        if not include_num_layers_dimension:
            return order
        # A page of all layers together, as those who move caches between machines want it.
        if order == _NHD:
            return (1, 0, 3, 2, 4)
        return (1, 2, 0, 3, 4)
