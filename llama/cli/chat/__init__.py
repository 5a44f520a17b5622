"""A chat in a terminal: what a person types in, streamed answers out."""
