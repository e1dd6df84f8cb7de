"""OpenAI-compatible HTTP over the engine, and what turns text into messages."""
