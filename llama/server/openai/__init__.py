"""OpenAI's API as data: the bodies of requests and responses, for the server and batch files."""
