"""`llama serve --replicas N`: several servers with a copy of the model each, at one address."""
