"""The command `llama plan`: how a model fits into devices that may be elsewhere."""
