"""Drafts as ordinary checkpoints, for engines that draft with a model: transformers, llama.cpp, vLLM, SGLang."""
