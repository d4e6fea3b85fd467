"""CUDA C++ where launch cost decides, compiled at run time without torch headers."""
