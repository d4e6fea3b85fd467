"""Running a model over a step: inputs, attention over the cache, CUDA graphs."""
