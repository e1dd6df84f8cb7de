"""A tiny target, drafter and corpus, built in memory for the trainer's tests."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from lean_laguna.train.dataset import encode_documents, save_meta, save_tokens
from lean_laguna.train.recipe import DrafterRecipe, SelfgenRecipe, TargetRecipe, build_recipe
from lean_laguna.train.tokenizer import chat_document, save_tokenizer, train_bpe

VOCAB = 320
TARGET_MODEL = {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "vocab_size": VOCAB, "hidden_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_attention_heads_per_layer": [2, 4, 4],
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "intermediate_size": 32,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "moe_routed_scaling_factor": 2.5,
    "gating": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "bos_token_id": 2,
    "eos_token_id": [2, 24], "pad_token_id": 9,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
DRAFTER_MODEL = {
    "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 32, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "gating": True,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_theta": 10000.0,
    "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "block_size": 6, "num_target_layers": 3,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 12, "causal": True},
}  # fmt: skip


def target_recipe(**changes):
    values = {
        "model": TARGET_MODEL, "seq_len": 24, "batch_rows": 4, "val_tokens": 200, "save_every_s": 0.0,
        "optimizer": {"lr": 5e-3},
    }  # fmt: skip
    return build_recipe(TargetRecipe, values | changes, "test")


def drafter_recipe(**changes):
    values = {
        "model": DRAFTER_MODEL, "batch_rows": 4, "anchors": 6, "short_block": 4, "long_every": 3,
        "save_every_s": 0.0, "optimizer": {"lr": 5e-3, "shape": "cosine"}, "num_eval_draft_tokens": 3,
    }  # fmt: skip
    return build_recipe(DrafterRecipe, values | changes, "test")


def selfgen_recipe(**changes):
    values = {
        "num_sequences": 8, "length": 24, "min_prefix": 3, "max_prefix": 8, "batch": 4, "eval_sequences": 3,
    }  # fmt: skip
    return build_recipe(SelfgenRecipe, values | changes, "test")


def write_data(folder: Path):
    """Write a prepared corpus as ``prepare_corpus`` does; returns its tokenizer and texts."""
    torch.set_num_threads(1)
    lines = (
        "def function_{i}(first, second):",
        "    if first > {i}:",
        "        return second",
        "    return first + {i}",
    )
    texts = ["".join(line.format(i=i) + "\n" for line in lines) * 3 for i in range(40)]
    tokenizer = train_bpe(texts, VOCAB)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer", 128)
    chat = [chat_document("Do it", "def f():\n    return 1")] * 3
    streams = {
        "train": encode_documents(tokenizer, texts[:30] + chat),
        "val": encode_documents(tokenizer, texts[30:]),
    }
    meta = {
        "tokens": {name: len(stream) for name, stream in streams.items()},
        "sha256": {name: save_tokens(folder, name, stream) for name, stream in streams.items()},
    }
    save_meta(folder, meta, tokenizer)
    return tokenizer, texts


def write_recipes(folder: Path, drafter_model=None) -> Path:
    """Write ``target.toml`` and ``dflash.toml`` for the tiny pair; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    drafter = asdict(drafter_recipe()) | {"selfgen": asdict(selfgen_recipe())}
    drafter["model"] = drafter_model or DRAFTER_MODEL
    for name, content in (("target", asdict(target_recipe())), ("dflash", drafter)):
        lines = [f"{key} = {_toml(value)}\n" for key, value in content.items()]
        (folder / f"{name}.toml").write_text("".join(lines))
    return folder


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def write_documents_recipe(path: Path, *, dspark: bool, model=None, kind="adamw", **changes) -> Path:
    """Write a recipe for training on documents, DSpark or DFlash; returns its path."""
    given = dict(model or DRAFTER_MODEL)
    if dspark:
        given |= {"architectures": ["LagunaDSparkModel"], "dspark_config": {"markov_rank": 4}}
    values = {
        "model": given, "batch_rows": 2, "anchors": 6, "short_block": 6, "long_every": 0, "loss": "decay",
        "num_eval_draft_tokens": 5, "length": 128, "min_supervised": 3, "held_out_share": 0.2,
        "optimizer": {"lr": 5e-3, "shape": "cosine", "kind": kind}, "selfgen": {},
    } | changes  # fmt: skip
    if dspark:
        values["terms"] = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    return path
