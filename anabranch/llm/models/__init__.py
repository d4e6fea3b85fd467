"""Where models come from: transformers directories, GGUF files, a hub, or random weights."""

from anabranch.llm.models.load import Activations, LoadedModel, load_model
from anabranch.llm.models.memory import check_fits
from anabranch.llm.models.smollm2 import smollm2_directory

__all__ = ["Activations", "LoadedModel", "check_fits", "load_model", "smollm2_directory"]
