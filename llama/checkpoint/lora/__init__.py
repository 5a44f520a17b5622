"""LoRA adapters: read, merged into weights, or kept apart for requests to choose."""
