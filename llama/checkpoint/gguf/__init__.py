"""GGUF files: sizes, quantized blocks, and writing."""
