"""Anthropic's Messages API as data: the bodies of requests and responses, and the events."""
