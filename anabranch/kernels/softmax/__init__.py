"""Logits, masks, the online softmax and the merge of states, as values of kernels."""
