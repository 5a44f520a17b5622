"""Hugging Face's folders: config.json, tensors, quantized formats, tokenizer."""
