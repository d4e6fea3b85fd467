"""Attention for Hopper GPUs in Gluon: warp roles, TMA copies and the order of tiles spelled out."""
