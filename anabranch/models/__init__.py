"""Where models come from: transformers directories, GGUF files, a hub, or random weights."""

from anabranch.models.load import LoadedModel, load_model
from anabranch.models.memory import check_fits
from anabranch.models.smollm2 import smollm2_directory

__all__ = ["LoadedModel", "check_fits", "load_model", "smollm2_directory"]
