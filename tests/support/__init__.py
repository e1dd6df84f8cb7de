"""What several tests build on: small tokenizers, templates, checkpoints."""
