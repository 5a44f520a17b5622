"""The benchmark: how fast we are, alongside other engines and alongside what the machine can do."""
