"""Checkpoints that compressed-tensors writes, read by us, and ours read by compressed-tensors.

Logits are held against transformers' Laguna with the weights that compressed-tensors decodes, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_laguna.convert import shard_conversion, worker_pool
from lean_laguna.convert.modules import GROUPS, class_of, fused_set
from lean_laguna.core.model_config import LagunaConfig, read_config_json
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.quant.config import read_quantization
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, NVFP4, WeightScheme, packed_integer
from support.compressed import their_scheme, their_tensors
from support.quantised import convert, convert_mixed, write_target
from support.targets import random_ids

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

# Two float32 programs that add in another order; see test_laguna_against_transformers.
RELATIVE = 1e-5
FORMS: dict[str, dict[str, WeightScheme]] = {
    "nvfp4 experts": {"experts": NVFP4, "shared": NVFP4},
    "nvfp4 all": dict.fromkeys(GROUPS["all"], NVFP4),
    "fp8 tensor": dict.fromkeys(GROUPS["all"], WeightScheme("fp8", 8, "tensor", "naive-quantized")),
    "fp8 channel": dict.fromkeys(GROUPS["all"], FP8_CHANNEL),
    "fp8 block": dict.fromkeys(GROUPS["all"], FP8_BLOCK),
    "int8 channel": dict.fromkeys(GROUPS["all"], INT8_CHANNEL),
    "int8 group": {"experts": packed_integer(8, 16)},
    "int4 group": {"experts": packed_integer(4, 16), "attention": packed_integer(4, 16)},
    "int4 row": {"experts": packed_integer(4, None)},
    "int4 asymmetric": {"experts": packed_integer(4, 8, symmetric=False)},
    "int8 asymmetric": {"attention": packed_integer(8, 16, symmetric=False)},
    "mixed": {
        "experts": packed_integer(4, 16),
        "shared": NVFP4,
        "attention": FP8_CHANNEL,
        "dense": INT8_CHANNEL,
    },
}


def decoded(tensors: dict[str, torch.Tensor], scheme: WeightScheme) -> torch.Tensor:
    """Return a weight as compressed-tensors decodes it, in float32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    theirs = their_scheme(scheme)
    if scheme.number != "fp4":
        weight = BaseCompressor.get_value_from_registry(scheme.storage).decompress(tensors, theirs)["weight"]
        assert weight.dtype == torch.float32
        return weight
    rows, columns = tensors["weight_packed"].shape
    values = unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * columns, dtype=torch.float32)
    return dequantize(
        x_q=values,
        scale=tensors["weight_scale"].float(),
        args=theirs.weights,
        global_scale=tensors["weight_global_scale"],
        dtype=torch.float32,
    )


def write_both(folder: Path, form: dict[str, WeightScheme]) -> tuple[Path, Path]:
    """Write a checkpoint quantised by compressed-tensors, and one with the weights that it decodes."""
    from compressed_tensors.quantization import QuantizationConfig

    plain, quantised = folder / "plain", folder / "quantised"
    write_target(plain, torch.float32)
    quantised.mkdir()
    whole = load_file(str(plain / "model.safetensors"))
    stored: dict[str, torch.Tensor] = {}
    groups: dict[str, list[str]] = {}
    for name, tensor in list(whole.items()):
        module = name.removesuffix(".weight")
        scheme = form.get(str(class_of(module)))
        if scheme is None:
            stored[name] = tensor
            continue
        groups.setdefault(repr(scheme), []).append(module)
        parts = their_tensors(tensor, scheme)
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        whole[name] = decoded(parts, scheme).contiguous()
    save_file(stored, str(quantised / "model.safetensors"))
    save_file(whole, str(plain / "model.safetensors"))
    by_name = {repr(scheme): scheme for scheme in form.values()}
    config = {}
    for i, (key, modules) in enumerate(groups.items()):
        config[f"group_{i}"] = their_scheme(by_name[key]).model_copy(update={"targets": modules})
    formats = {by_name[key].storage for key in groups}
    written = QuantizationConfig(
        config_groups=config,
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head"] if "head" not in form else [],
    )
    given: dict[str, Any] = json.loads((plain / "config.json").read_text())
    given["quantization_config"] = json.loads(json.dumps(written.to_dict(), default=str))
    (quantised / "config.json").write_text(json.dumps(given))
    return plain, quantised


def theirs_of(folder: Path) -> Any:
    config = LagunaConfig.from_dict(read_config_json(folder))
    theirs = transformers.LagunaForCausalLM(transformers.LagunaConfig(**config.to_dict()))
    theirs.config._attn_implementation = "eager"
    theirs.load_state_dict(dict(load_laguna(folder).state_dict()), strict=False)
    return theirs.eval()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_their_checkpoints_give_the_logits_of_their_weights(
    form: dict[str, WeightScheme], tmp_path: Path
) -> None:
    plain, quantised = write_both(tmp_path, form)
    ids = random_ids(40)
    with torch.no_grad():
        expected = theirs_of(plain)(ids[None]).logits[0]
        ours = load_laguna(quantised)
        found = ours.compute_logits(ours.forward_dense(ids[None]).hidden_states[0])
    assert (found - expected).abs().max() / expected.abs().max() < RELATIVE


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block", "fp8-channel", "int8", "int4:16", "mixed"])
def test_their_loader_decodes_our_checkpoints_to_our_weights(scheme: str, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import CompressedTensorsDequantizer

    source, made = write_target(tmp_path / "source"), tmp_path / "made"
    if scheme == "mixed":
        convert_mixed(source, made)
    else:
        convert(source, made, "all", scheme)
    dequantizer = CompressedTensorsDequantizer(made)
    theirs = dequantizer.validate(load_file(str(made / "model.safetensors")))
    from lean_laguna.convert.source import open_source

    ours = open_source(made)
    assert set(theirs) == set(ours.reader.names())
    assert ours.quantised
    for module in ours.quantised:
        expected = theirs[f"{module}.weight"]
        assert torch.equal(ours.reader.get(f"{module}.weight").bfloat16(), expected), module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_of_a_checkpoint_is_theirs_whoever_converts_it(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_target(tmp_path / "source", dtype)
    plain = load_file(str(source / "model.safetensors"))
    convert(source, tmp_path / "alone", "experts+attention", "nvfp4")
    monkeypatch.setattr(worker_pool, "_OWN_THREADS", 0)
    monkeypatch.setattr(shard_conversion, "_PART_BYTES", 5000)
    convert(source, tmp_path / "made", "experts+attention", "nvfp4", num_workers=2)
    file = "model.safetensors"
    assert (tmp_path / "made" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()
    made = load_file(str(tmp_path / "made" / file))
    modules = [name.removesuffix(".weight_packed") for name in made if name.endswith(".weight_packed")]
    assert len(modules) == 97
    for module in modules:
        members = [plain[f"{m}.weight"] for m in modules if fused_set(m) == fused_set(module)]
        largest = torch.stack([weight.abs().amax() for weight in members]).amax()
        for part, expected in their_tensors(plain[f"{module}.weight"], NVFP4, largest).items():
            found = made[f"{module}.{part}"]
            assert found.dtype == expected.dtype
            assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)), (
                module,
                part,
            )


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block", "int4:16", "mixed"])
def test_their_config_means_the_modules_that_we_mean(scheme: str, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    source, made = write_target(tmp_path / "source"), tmp_path / "made"
    if scheme == "mixed":
        convert_mixed(source, made)
    else:
        convert(source, made, "experts+attention", scheme)
    given = read_config_json(made)
    config = read_quantization(given, "config.json")
    assert config is not None
    from lean_laguna.convert.source import open_source

    model = torch.nn.Module()
    for module, (rows, columns) in open_source(made).shapes.items():
        owner = model
        *path, leaf = module.split(".")
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(leaf, torch.nn.Linear(columns, rows, bias=False))
    apply_quantization_config(model, QuantizationConfig.model_validate(given["quantization_config"]))
    for name, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear):
            continue
        meant = config.scheme_of(name)
        attached = getattr(linear, "quantization_scheme", None)
        assert (attached is None) == (meant is None), name
        if meant is not None:
            assert attached.weights.num_bits == meant.num_bits, name
            assert attached.weights.strategy == meant.strategy, name
            assert attached.format == meant.storage, name
