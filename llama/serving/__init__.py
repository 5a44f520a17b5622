"""Other ways in than Meta's API: model workers, and the bodies of OpenAI's API."""
