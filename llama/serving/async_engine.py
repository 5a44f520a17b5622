"""The old place of `llama.AsyncLLMEngine`."""

from llama.requests.async_engine import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
