"""What `llama.serving.vllm_api` is made of: vLLM's parameters, outputs, tokenizer and engines."""
