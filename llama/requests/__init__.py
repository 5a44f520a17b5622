"""Text over the engine: requests with text in, outputs with text out, for any number of threads."""
