"""Sampling: from logits to tokens, for a whole batch on the device."""
