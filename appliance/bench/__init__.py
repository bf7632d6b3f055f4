"""Measures any server with OpenAI's completions API, as its clients see it. Imports no torch."""
