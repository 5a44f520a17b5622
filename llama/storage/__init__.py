"""Model files on disk, below every weight format: their folders, downloads and GGUF headers."""
