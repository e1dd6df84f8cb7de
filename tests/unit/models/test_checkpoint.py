import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.targets import FULL, laguna_json, random_ids, random_target, run_alone

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import load_laguna, load_target_config, save_laguna

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def folder(tiny_target, tiny_config, tmp_path):
    save_laguna(tiny_target, tiny_config, tmp_path)
    return tmp_path


def rewrite(folder, change):
    """Apply ``change`` to the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    given = json.loads((folder / "config.json").read_text()) | changes
    given = {key: value for key, value in given.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(given))


def rename(folder, function):
    def change(tensors):
        for name in list(tensors):
            tensors[function(name)] = tensors.pop(name)

    rewrite(folder, change)


def assert_same(loaded, target):
    ids = random_ids(30)
    assert torch.equal(run_alone(loaded, ids, [30])[0], run_alone(target, ids, [30])[0])


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: name,
        lambda name: "language_model." + name,
        lambda name: name if name.startswith("lm_head") else "language_model.model." + name,
        lambda name: name.removeprefix("model."),
        lambda name: name.replace(".mlp.experts.e_score", ".mlp.gate.e_score"),
        lambda name: name.replace(".shared_expert.", ".shared_experts."),
    ],
    ids=[
        "plain",
        "language_model.",
        "language_model.model.",
        "no prefix",
        "bias of the gate",
        "shared_experts",
    ],
)
def test_names_have_many_spellings(folder, tiny_target, spell):
    rename(folder, spell)
    assert_same(load_laguna(folder), tiny_target)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_experts_may_be_fused(folder, tiny_target, suffix):
    def fuse(tensors):
        for name in list(tensors):
            if ".mlp.experts." in name and name.endswith("_proj.weight"):
                del tensors[name]
        for name, tensor in tiny_target.state_dict().items():
            if name.endswith((".gate_up_proj", ".experts.down_proj")):
                tensors[name + suffix] = tensor.contiguous()

    rewrite(folder, fuse)
    assert_same(load_laguna(folder), tiny_target)


def test_rotary_buffers_are_passed_over(folder, tiny_target):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert_same(load_laguna(folder), tiny_target)


def test_loaded_weights_are_float32_and_want_no_gradients(folder):
    rewrite(folder, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    for parameter in load_laguna(folder).parameters():
        assert parameter.dtype == torch.float32
        assert not parameter.requires_grad
    assert load_laguna(folder, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_tied_heads_may_be_stored_and_must_then_agree(tmp_path):
    config = LagunaConfig.from_dict(laguna_json(tie_word_embeddings=True))
    target = random_target(config)
    save_laguna(target, config, tmp_path)
    loaded = load_laguna(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same(load_laguna(tmp_path), target)
    rewrite(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differs from the embedding"):
        load_laguna(tmp_path)


@pytest.mark.parametrize(
    ("gating", "expected"), [(True, "per-head"), ("per-element", "per-element"), (False, "off")]
)
def test_a_config_silent_on_gates_is_read_by_the_width_of_g_proj(tmp_path, gating, expected):
    config = LagunaConfig.from_dict(laguna_json(gating=gating))
    target = random_target(config)
    save_laguna(target, config, tmp_path)
    edit_config(tmp_path, gating=...)
    loaded = load_laguna(tmp_path)
    assert loaded.config.gating == (expected,) * 4
    assert_same(loaded, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            r"tensor 'model\.norm\.weight' is missing; expected shape \[32\]",
        ),
        (
            lambda t: t.pop("lm_head.weight"),
            r"tensor 'lm_head\.weight' is missing; expected shape \[64, 32\]",
        ),
        (
            lambda t: t.pop(f"{EXPERTS}.3.up_proj.weight"),
            r"3\.up_proj\.weight' is missing; expected shape \[16, 32\] \(or fused .*gate_up_proj'\)",
        ),
        (
            lambda t: t.pop("model.layers.2.mlp.experts.e_score_correction_bias"),
            r"e_score_correction_bias' is missing",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(33)}),
            r"model\.safetensors: tensor 'model\.norm\.weight': found shape \[33\], expected \[32\]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.0.down_proj.weight": torch.ones(16, 32)}),
            r"found shape \[16, 32\], expected \[32, 16\]",
        ),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "'model.extra': is unexpected"),
        (
            lambda t: t.update({"vision.tower": torch.ones(1)}),
            "'vision.tower' is unexpected: all but lm_head",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.sink": torch.ones(6)}),
            r"self_attn\.sink': attention sinks are not supported",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(48)}),
            "biases are not supported",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.k_scale": torch.ones(1)}),
            "belongs to a quantised weight, but config.json has no quantization_config",
        ),
        (lambda t: t.update({f"{EXPERTS}.8.up_proj.weight": torch.ones(16, 32)}), "is unexpected"),
        (
            lambda t: t.update({"model.layers.9.input_layernorm.weight": torch.ones(32)}),
            "is unexpected: the config describes no such tensor",
        ),
        (
            lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")),
            r"model\.safetensors: tensor '.*0\.mlp\.up_proj\.weight': 1536 of 1536 values are not finite",
        ),
        (
            lambda t: t[f"{EXPERTS}.5.gate_proj.weight"][3].fill_(float("inf")),
            r"5\.gate_proj\.weight': 32 of 512 values are not finite in torch.float32; expected none",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.uint8)}),
            "found type U8, expected one of F32, BF16, F16, F64",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(8, 32, 32)}),
            "is unexpected: the config describes no such tensor",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.e_score_correction_bias": torch.ones(8)}),
            "is also stored as",
        ),
        (
            lambda t: t.pop("model.embed_tokens.weight"),
            "expected one tensor 'model.embed_tokens.weight'.*found none",
        ),
    ],
)
def test_bad_tensors_are_named_with_what_was_expected(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_laguna(folder)
    assert str(caught.value).startswith(str(folder))


def test_a_value_too_large_for_the_format_in_memory_is_named(folder):
    rewrite(folder, lambda t: t["model.norm.weight"].fill_(1e30))
    load_laguna(folder)
    with pytest.raises(CheckpointError, match=r"32 of 32 values are not finite in torch\.float16"):
        load_laguna(folder, dtype=torch.float16)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantization_config", {"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ("quantization", {"bits": 4, "mode": "nvfp4"}, r"'quantization' \(nvfp4\) is MLX's layout"),
    ],
)
def test_unknown_kinds_of_quantisation_are_refused(folder, key, value, message):
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigError, match=message):
        load_laguna(folder)
    load_target_config(folder)


def test_config_errors_name_the_file(folder):
    edit_config(folder, sliding_window=-1)
    with pytest.raises(
        ConfigError, match=rf"{folder}.*config\.json: 'sliding_window' must be a whole number"
    ):
        load_laguna(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json: not found|nowhere.*: not found"):
        load_laguna(tmp_path / "nowhere")


def with_factor(folder, attention_factor):
    ropes = laguna_json()["rope_parameters"]
    if attention_factor is not None:
        ropes[FULL]["attention_factor"] = attention_factor
    edit_config(folder, rope_parameters=ropes)


def test_an_attention_factor_of_one_is_used_with_a_warning_that_offers_the_formula(folder):
    with_factor(folder, 1.0)
    with pytest.warns(
        UserWarning, match=r"attention_factor is 1\.0 .*pass attention_factor=1\.138629436111989"
    ):
        target = load_laguna(folder)
    assert target.config.full_rope.attention_scaling == 1.0


@pytest.mark.filterwarnings("error")
def test_the_override_is_used_in_silence_and_changes_the_output(folder, tiny_target):
    with_factor(folder, 1.0)
    overridden = load_laguna(folder, attention_factor=1.1386294361119891)
    assert overridden.config.full_rope.attention_scaling == 1.1386294361119891
    # The tiny target's own config leaves the factor to the formula, which gives this value.
    assert_same(overridden, tiny_target)
    other = load_laguna(folder, attention_factor=1.5)
    assert not torch.equal(
        run_alone(other, random_ids(30), [30])[0], run_alone(tiny_target, random_ids(30), [30])[0]
    )


def test_an_override_needs_yarn_and_a_positive_factor(folder):
    for wrong in (-1.0, 9e18):
        with pytest.raises(
            ConfigError, match=rf"attention_factor must be a number from .*, found {wrong!r:.2}"
        ):
            load_laguna(folder, attention_factor=wrong)
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    edit_config(folder, rope_parameters={FULL: plain, "sliding_attention": plain})
    with pytest.raises(ConfigError, match="applies to yarn only; full-attention layers use default"):
        load_laguna(folder, attention_factor=1.0)


def test_a_drafter_is_named_a_drafter_before_its_tensors_are_looked_for(folder):
    edit_config(folder, architectures=["DFlashLagunaForCausalLM"])
    rename(folder, lambda name: f"draft.{name}")
    with pytest.raises(ConfigError, match="this is a drafter"):
        load_laguna(folder)
