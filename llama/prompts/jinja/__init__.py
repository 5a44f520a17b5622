"""Chat templates in Jinja: rendered in a sandbox, with a mark on every text that they wrote."""
