"""A load generator for OpenAI endpoints: ours, vLLM's, llama.cpp's."""
