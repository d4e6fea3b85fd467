"""Portable kernels for NVIDIA and AMD GPUs, testable in the interpreter on the CPU."""
