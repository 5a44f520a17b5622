"""Writing: conversions, quantized formats, and files that are complete or absent."""
