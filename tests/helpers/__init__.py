"""Helpers that tests share: oracles, random checkpoints, prompts, and starting real processes."""
