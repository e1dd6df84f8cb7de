"""What a drafter is: the frozen configuration behind all checkpoint formats, DFlash and DSpark.

How each format spells it is in ``drafter_formats`` and ``drafter_writing``; the networks are
``models.dflash`` and ``models.dspark``.
Source: vLLM 0.33 laguna_dflash.py, z-lab dflash 0.1.0 model.py, speculators 0.9.0 models/dflash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lean_laguna.core.drafter_formats import parse_deepspec, parse_laguna, parse_speculators, parse_zlab
from lean_laguna.core.drafter_keys import check_names, check_values
from lean_laguna.core.dspark_config import DSparkHeads, names_dspark, read_heads, read_layout
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.files import parse_json
from lean_laguna.core.json_fields import Fields, architectures

if TYPE_CHECKING:
    from lean_laguna.core.model_config import Gating, LagunaConfig
    from lean_laguna.core.rope_config import RopeConfig

DrafterFormat = Literal["laguna", "z-lab", "speculators", "deepspec"]


@dataclass(frozen=True)
class DFlashConfig:
    """The shape and the drafting rules of one DFlash drafter; immutable, whatever file it came from.

    Attributes:
        format: Where it was read from, and so how its tensors are named.
        hidden_size: Width of the drafter, and of the target whose embedding and lm_head it shares.
        num_hidden_layers: Draft layers.
        num_attention_heads: Query heads, the same in every layer.
        num_key_value_heads: Key/value heads.
        head_dim: Size of one head.
        intermediate_size: Width of the feed-forward.
        layer_windows: Per layer, the keys a query sees counting itself (k > q - window), or None for all.
        layer_causal: Per layer, True where a block row sees only itself and earlier block rows.
        draft_block_size: Slots of a block, the anchor's included.
        target_layer_ids: 0-based target layers whose raw residual output feeds the drafter, in order.
        num_target_layers: Layers of the target it was trained for, or None where the file does not say.
        mask_token_id: Token whose embedding fills the slots to predict.
        rope: Rotary embedding of every layer.
        gating: Softplus output gate of the attention: ``per-head``, ``per-element`` or ``off``.
        has_aux_norms: Each tap has its own RMSNorm before the projection.
        norm_context: Each layer applies its input_layernorm to the context too.
        vocab_size: Words of the target.
        draft_vocab_size: Words it can propose; below ``vocab_size`` it brings its own lm_head and map.
        max_position_embeddings: Positions it can stand on; drafting stops there, serving does not.
        rms_norm_eps: Epsilon of every RMSNorm.
        dspark: The heads that make it a DSpark drafter, or None for plain DFlash.
        sample_from_anchor: DSpark only: slot k predicts the token after its position, the anchor's slot too;
            otherwise a mask predicts the token at its own position and the anchor's slot nothing.
    """

    format: DrafterFormat
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    layer_windows: tuple[int | None, ...]
    layer_causal: tuple[bool, ...]
    draft_block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int
    rope: RopeConfig
    gating: Gating
    has_aux_norms: bool
    norm_context: bool
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    dspark: DSparkHeads | None = None
    sample_from_anchor: bool = False

    @property
    def first_slot(self) -> int:
        """The block's first slot that predicts a token: 0 where the anchor's does, else 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens one block can hold: its slots that predict."""
        return self.draft_block_size - self.first_slot

    @property
    def causal(self) -> bool:
        """True where no row depends on later ones, so a shorter block gives the same rows."""
        return all(self.layer_causal)

    @property
    def window(self) -> int | None:
        """Window of the sliding layers, or None where there are none."""
        return next((window for window in self.layer_windows if window is not None), None)

    @property
    def has_own_lm_head(self) -> bool:
        """True where the drafter proposes from a vocabulary of its own."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "drafter config") -> DFlashConfig:
        """Read a config.json of any of the formats.

        Raises:
            CheckpointError: It describes a target, or a drafter of another kind.
            ConfigError: A value is missing or wrong; the message names it and what is accepted.
        """
        fmt = detect_format(given, where)
        parse = {
            "laguna": parse_laguna,
            "z-lab": parse_zlab,
            "speculators": parse_speculators,
            "deepspec": parse_deepspec,
        }[fmt]
        check_names(given, where)
        fields, is_dspark = Fields(given, where), names_dspark(given)
        # DeepSpec knows the shifted layout only, and speculators takes it where its DSpark says nothing.
        is_shifted = is_dspark and fmt in ("deepspec", "speculators")
        config = cls(
            format=fmt,
            **parse(fields),
            dspark=read_heads(fields) if is_dspark else None,
            sample_from_anchor=read_layout(fields, default=is_shifted, is_dspark=is_dspark),
        )
        config._check(where)
        check_values(given, where)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> DFlashConfig:
        """Read ``config.json``, given itself or its folder.

        Raises:
            CheckpointError: No such file, not JSON, or not a DFlash drafter.
            ConfigError: A value is missing or wrong.
        """
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        try:
            given = parse_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: no such file; a drafter folder holds config.json and safetensors"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: not valid JSON ({error})") from None
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{file}: must hold a JSON object, found {type(given).__name__}")
        return cls.from_dict(given, str(file))

    def _check(self, where: str) -> None:
        """Refuse what the network could not be built from."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{where}: 'num_attention_heads' ({self.num_attention_heads}) must be a multiple of "
                f"'num_key_value_heads' ({self.num_key_value_heads})"
            )
        if self.max_draft_tokens < 1:
            raise ConfigError(f"{where}: 'block_size' must be at least 2 (anchor and one mask), found 1")
        if self.draft_block_size > self.max_position_embeddings:
            raise ConfigError(
                f"{where}: 'block_size' must be at most max_position_embeddings "
                f"({self.max_position_embeddings}), found {self.draft_block_size}"
            )
        taps = self.target_layer_ids
        if min(taps) < 0 or len(set(taps)) != len(taps):
            raise ConfigError(
                f"{where}: 'target_layer_ids' must be distinct layers from 0, found {list(taps)}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ConfigError(
                f"{where}: 'mask_token_id' must be below vocab_size ({self.vocab_size}), "
                f"found {self.mask_token_id}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"{where}: 'draft_vocab_size' must be at most vocab_size ({self.vocab_size}), found "
                f"{self.draft_vocab_size}"
            )

    def check_target(self, target: LagunaConfig, where: str = "drafter") -> None:
        """Refuse to draft for a target this drafter was not made for; acceptance would silently be zero.

        Raises:
            ConfigError: Names the field, the drafter's value and the value that the target needs.
        """
        for name in ("hidden_size", "vocab_size"):
            mine, expected = getattr(self, name), getattr(target, name)
            if mine != expected:
                raise ConfigError(
                    f"{where}: '{name}' is {mine}, but the target's is {expected}; not made for this target"
                )
        depth = target.num_hidden_layers
        if self.num_target_layers is not None and self.num_target_layers != depth:
            raise ConfigError(
                f"{where}: 'num_target_layers' is {self.num_target_layers}, but the target has {depth} "
                "layers; not made for this target"
            )
        if max(self.target_layer_ids) >= depth:
            raise ConfigError(
                f"{where}: 'target_layer_ids' {list(self.target_layer_ids)} must lie in 0..{depth - 1}: "
                f"the target has {depth} layers"
            )


def is_drafter_config(given: Mapping[str, Any]) -> bool:
    """Return True for the config.json of any drafter, served beside a target and never on its own."""
    names = " ".join(architectures(given))
    keys = ("dflash_config", "dspark_config", "speculators_model_type")
    marked = any(given.get(key) is not None for key in keys)
    return marked or any(word in names for word in ("DFlash", "DSpark", "Eagle", "Speculator"))


def detect_format(given: Mapping[str, Any], where: str) -> DrafterFormat:
    """Tell the formats apart.

    Raises:
        CheckpointError: It describes a target, or a drafter of another kind.
        ConfigError: Its architectures are no list.
    """
    if not isinstance(given.get("architectures"), list | None):
        raise Fields(given, where).wrong("architectures", "a list of names")
    names = architectures(given)
    kind = given.get("speculators_model_type")
    if kind is not None:
        if kind not in ("dflash", "dspark"):
            raise CheckpointError(
                f"{where}: 'speculators_model_type' must be 'dflash' or 'dspark', found {kind!r}"
            )
        return "speculators"
    is_laguna = given.get("model_type") == "laguna" or any("Laguna" in name for name in names)
    for name in names:
        if name == "Qwen3DSparkModel":
            return "deepspec"
        is_foreign = "DSpark" in name and not is_laguna
        if is_foreign or "DFlash2" in name or "Eagle" in name or name.startswith("Qwen3DFlash"):
            raise CheckpointError(
                f"{where}: architecture {name} is another kind of drafter; expected DFlash in the Laguna, "
                "z-lab or speculators format, or DSpark in the Laguna, speculators or DeepSpec format"
            )
    if not is_drafter_config(given):
        raise CheckpointError(
            f"{where}: this is a target ({', '.join(names) or given.get('model_type', 'unnamed')}), not a "
            "drafter; pass it as the model and a drafter as the speculative model"
        )
    if names and not any(kind in name for name in names for kind in ("DFlash", "DSpark", "Laguna")):
        raise CheckpointError(
            f"{where}: 'architectures' must name a DFlash or DSpark drafter, such as 'DFlashDraftModel', "
            f"found {', '.join(names)}"
        )
    return "laguna" if is_laguna else "z-lab"
