"""Models that are fetched from a hub, by their id."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from anabranch.llm.models.checkpoint import config_file
from anabranch.llm.models.model_config import read_config

SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
WEIGHTS = ["model*.safetensors"]  # no second copies such as original/ and consolidated


def hub_directory(model_id: str) -> Path:
    """Download a model by its id `org/name`; one that will be refused is not downloaded whole."""
    directory = _download(model_id, SMALL_FILES)
    read_config(config_file(directory))
    return _download(model_id, [*SMALL_FILES, *WEIGHTS])


def _download(model_id: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{model_id!r} is no model id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(
            f"{model_id!r} is no local path, and the hub did not give it: {reason}"
        ) from error
