"""OpenAI-compatible HTTP server of the standalone engine; see README.md for the path of a request through it."""
