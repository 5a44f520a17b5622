"""The ways in beside Meta's API: async requests, model workers, batch files. Text in, text out."""
