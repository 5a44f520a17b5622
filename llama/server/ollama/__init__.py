"""Ollama's API as data and routes: bodies, answers, and what describes the model."""
