"""Drafts of the next tokens, by look-up or of a small model, which one step verifies."""
