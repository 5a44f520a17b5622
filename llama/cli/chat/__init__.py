"""A chat in a terminal: a person types questions, and the answers are streamed to the screen."""
