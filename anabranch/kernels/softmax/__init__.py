"""Logits, masks and the online softmax: values of kernels, which import nothing else."""
