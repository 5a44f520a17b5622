"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over one engine.

It needs the extra `serve`.
"""
