"""How the demo model was made: its corpus, its tokenizer and its training."""
