"""OpenAI-compatible HTTP over one engine: any option gives with a drafter what it gives without."""
