"""Speculative decoding: proposing tokens and verifying them."""
