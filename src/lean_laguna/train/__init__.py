"""The trainer: corpus and tokenizer, the nano target, and drafters on a target's own text.

``stages`` runs a recipe from end to end, as ``lean-laguna train`` does; ``prepare.prepare_corpus``,
``target.train_target`` and ``drafter.train_drafter`` are the parts below it. Recipes are TOML files
(``recipe``).
"""
