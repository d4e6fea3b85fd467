"""How tokens are chosen where a request does not say: by the model's generation_config.json."""

from __future__ import annotations

import logging
from typing import Any

from anabranch.llm.sampling.params import SamplingParams

# by the name in the file
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
log = logging.getLogger("anabranch")


def sampling_defaults(model: Any, wanted: str) -> dict[str, Any]:
    """Options of SamplingParams that the file sets; none where `wanted` is "none"."""
    generation: Any = getattr(model, "generation_config", None)
    if wanted == "none" or generation is None:
        return {}
    given: dict[str, Any] = generation.to_diff_dict()
    found = {ours: given[name] for name, ours in NAMES.items() if given.get(name) is not None}
    for name, value in list(found.items()):
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            log.warning("generation_config.json is not used for %s: %s", name, error)
            del found[name]
    return found
