"""Attention shapes of real models; the suite takes its sizes from here and nowhere else."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Heads of one model: ``q`` query and ``kv`` key/value heads of ``head_dim`` x ``width`` in each layer."""

    name: str
    layers: int
    q: int
    kv: int
    head_dim: int
    width: int
    source: str


SHAPES = {
    "gpt2": Shape("GPT-2 small", 12, 12, 12, 64, 768, "openai-community/gpt2 config.json: n_layer, n_head, n_embd"),
    "gpt2-xl": Shape("GPT-2 XL", 48, 25, 25, 64, 1600, "openai-community/gpt2-xl config.json: n_layer, n_head, n_embd"),
    "vit-b": Shape("ViT-B/16", 12, 12, 12, 64, 768, "timm vit_base_patch16_224: depth, num_heads, embed_dim"),
    "vit-l": Shape("ViT-L/16", 24, 16, 16, 64, 1024, "timm vit_large_patch16_224: depth, num_heads, embed_dim"),
    "opt-1.3b": Shape("OPT 1.3B", 24, 32, 32, 64, 2048, "facebook/opt-1.3b config.json"),
    "llama-7b": Shape("Llama 2 7B", 32, 32, 32, 128, 4096, "meta-llama/Llama-2-7b-hf config.json"),
    "llama-8b": Shape("Llama 3 8B", 32, 32, 8, 128, 4096, "meta-llama/Meta-Llama-3-8B config.json"),
    "llama-70b": Shape("Llama 3 70B", 80, 64, 8, 128, 8192, "meta-llama/Meta-Llama-3-70B config.json"),
    "qwen3-0.6b": Shape("Qwen3 0.6B", 28, 16, 8, 128, 1024, "Qwen/Qwen3-0.6B config.json: head_dim is explicit"),
    "qwen3-8b": Shape("Qwen3 8B", 36, 32, 8, 128, 4096, "Qwen/Qwen3-8B config.json"),
    "gemma-7b": Shape("Gemma 7B", 28, 16, 16, 256, 3072, "google/gemma-7b config.json: head_dim is explicit"),
    "gemma2-2b": Shape("Gemma 2 2B", 26, 8, 4, 256, 2304, "google/gemma-2-2b config.json: head_dim is explicit"),
}
