"""The trainer: corpus and tokenizer, the nano target, and drafters on a target's own text.

``prepare.prepare_corpus``, ``target.train_target`` and ``drafter.train_drafter`` are its three entrances;
recipes are TOML files (``recipe``).
"""
