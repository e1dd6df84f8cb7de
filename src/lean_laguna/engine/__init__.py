"""Requests to tokens on one device: queue, KV blocks, steps, and what each completion has said."""
