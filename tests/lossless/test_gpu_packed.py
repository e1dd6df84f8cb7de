"""A quantised checkpoint on the GPU kernels, packed, says what the same checkpoint decoded at load says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.convert.quantize import quantize
from lean_laguna.convert.quantize_plan import Rule, make_plan, parse_scheme
from lean_laguna.convert.source import open_source
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_engine import GpuEngine
from lean_laguna.models.checkpoint import load_laguna
from support.engines import run_all
from support.gpu import LAYERS, toy_config, toy_tokenizer
from support.quantised import convert, write_target

pytestmark = pytest.mark.interpreted


def said(folder, *, keep_packed):
    """Tokens and logits of one request, and the engine's target."""
    target = load_laguna(folder, keep_packed=keep_packed)
    engine = GpuEngine(target, toy_tokenizer(), None, toy_config())
    logits = []
    engine.watch_logits(lambda _, rows: logits.append(rows.clone()))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    state = engine.add_request([40, 50, 60], params)
    run_all(engine)
    return state.sequences[0].completion.token_ids, torch.cat(logits), target


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "scheme", ["nvfp4", pytest.param("fp8-channel", marks=SLOW), pytest.param("int4:16", marks=SLOW)]
)
def test_packed_and_decoded_weights_give_the_same_logits(tmp_path, scheme, toy_16):
    convert(toy_16, tmp_path / "made", "all", scheme)
    tokens, logits, target = said(tmp_path / "made", keep_packed=True)
    assert len(target.packed_weights) > 10
    assert target.lm_head.weight.is_meta
    expected, plain_logits, _ = said(tmp_path / "made", keep_packed=False)
    assert tokens == expected
    assert torch.equal(logits, plain_logits)


@SLOW
def test_formats_may_differ_from_module_to_module(tmp_path, toy_16, capsys):
    quantise(toy_16, tmp_path / "half", r"re:.*(self_attn\.[qkvo]_proj|shared_expert.*)")
    found = said(tmp_path / "half", keep_packed=True)
    expected = said(tmp_path / "half", keep_packed=False)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert "decoded" not in capsys.readouterr().err
    quantise(toy_16, tmp_path / "odd", r"re:.*(self_attn\.k_proj|mlp\.gate_proj)")
    found = said(tmp_path / "odd", keep_packed=True)
    assert "decoded to float32 in memory" in capsys.readouterr().err
    assert torch.equal(found[1], said(tmp_path / "odd", keep_packed=False)[1])


def quantise(source, folder, modules):
    opened = open_source(source)
    quantize(opened, folder, make_plan(opened, [Rule(modules, parse_scheme("int8:row"))]))


@pytest.fixture
def toy_16(tmp_path):
    """A toy target in a folder, wide enough for groups of 16."""
    return write_target(
        tmp_path / "source",
        **LAYERS,
        hidden_size=32,
        num_attention_heads_per_layer=[2, 4],
        num_key_value_heads=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
