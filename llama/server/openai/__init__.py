"""OpenAI's completion APIs as data: request and response bodies, for the server and batch files."""
