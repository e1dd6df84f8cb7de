"""Networks only: the Laguna target, its drafters, weights in and out, tokenizer and chat template."""
