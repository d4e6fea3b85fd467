"""Where models come from: transformers directories, GGUF files, a hub, or random weights."""

from anabranch.llm.models.fetched_models import smollm2_directory
from anabranch.llm.models.load import Activations, LoadedModel, load_model

__all__ = ["Activations", "LoadedModel", "load_model", "smollm2_directory"]
