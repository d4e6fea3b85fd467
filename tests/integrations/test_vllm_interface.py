"""Our classes beside those of the vLLM that is installed: `make test-vllm`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

OURS = "anabranch.integrations.vllm"
PLAIN, LATENT = "backend.AnabranchBackend", "latent_backend.AnabranchLatentBackend"
CLASSES = [
    "backend.AnabranchAttention",
    PLAIN,
    "metadata_builder.AnabranchMetadataBuilder",
    "latent_backend.AnabranchLatentAttention",
    LATENT,
    "latent_metadata.AnabranchLatentMetadataBuilder",
]
KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def load(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"{OURS}.{module}"), attribute)


def inherited(cls: type, name: str) -> Any:
    """What vLLM defines of that name, in the class that others of its own derive from."""
    bases = (base for base in reversed(cls.__mro__) if base.__module__.startswith("vllm."))
    return next((vars(base)[name] for base in bases if name in vars(base)), None)


def takes(ours: Any, given: Parameter, place: int) -> bool:
    parameters = [*signature(ours).parameters.values()]
    kinds = {each.kind for each in parameters}
    named = {each.name for each in parameters}
    if given.name in named or Parameter.VAR_KEYWORD in kinds:
        return True
    positional = sum(each.kind in KINDS for each in parameters)
    return Parameter.VAR_POSITIONAL in kinds and place >= positional


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_what_vllm_gives(name: str) -> None:
    cls, compared = load(name), 0
    for base in (x for x in cls.__mro__ if x.__module__.startswith(OURS)):
        for attribute, value in vars(base).items():
            theirs = inherited(cls, attribute)
            function = getattr(value, "__func__", value)
            if theirs is None or not callable(function):
                continue
            given = signature(getattr(theirs, "__func__", theirs)).parameters.values()
            for place, each in enumerate(given):
                if each.kind in (*KINDS, Parameter.KEYWORD_ONLY):
                    assert takes(function, each, place), f"{attribute}: {each}"
            compared += 1
    assert compared


@pytest.mark.parametrize("name", [PLAIN, LATENT])
@pytest.mark.parametrize("use", ["use_dcp", "use_adaptive_verification", "use_kv_connector"])
def test_configurations_are_accepted(name: str, use: str) -> None:
    backend = load(name)
    latent = name == LATENT
    given = {
        "head_size": 576 if latent else 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": latent,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
    }
    if use not in signature(backend.validate_configuration).parameters:
        pytest.skip(f"this vLLM has no {use}")
    assert backend.validate_configuration(**given, **{use: True}) == []


@pytest.mark.parametrize("way", ["a2a", "ag_rs"])
def test_states_are_merged_across_ranks_by_a_function_of_vllm(way: str) -> None:
    combine = load("compat.combine_across_ranks")(SimpleNamespace(dcp_comm_backend=way))
    names = [*signature(combine).parameters]
    assert [each.split("_")[-1] for each in names[:3]] == ["out", "lse", "group"]
    assert "return_lse" in names
