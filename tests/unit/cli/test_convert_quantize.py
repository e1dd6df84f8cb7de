"""``convert quantize`` from its words to files, reports and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.cli.main import main
from lean_laguna.models.checkpoint import load_laguna
from support.quantised import change_tensors, write_target

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("source"))


@pytest.fixture
def run(source: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: Any, of: Path = source) -> tuple[int, str, str]:
        status = main(["convert", "quantize", str(of), *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def last_line(out: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def test_one_json_line_says_what_was_done(run: Run, tmp_path: Path) -> None:
    status, out, _ = run(tmp_path / "made", "--scheme", "nvfp4", "--check", "--json")
    assert (status, out.count("\n")) == (0, 1)
    report = last_line(out)
    assert {(row["class"], row["scheme"], row["num_modules"]) for row in report["modules"]} == {
        ("experts", "NVFP4", 72),
        ("shared", "NVFP4", 9),
    }
    assert len(report["errors"]) == 81
    assert all(0.01 < error < 0.2 for error in report["errors"].values())
    assert report["written_bytes"] == (tmp_path / "made" / "model.safetensors").stat().st_size
    load_laguna(tmp_path / "made")


def test_rules_go_before_modules(run: Run, tmp_path: Path) -> None:
    rules = ("--rule", r"re:.*layers\.1\.=keep", "--rule", "dense=int4:16")
    status, out, _ = run(tmp_path / "made", "--scheme", "int8", *rules, "--json")
    assert status == 0
    counts = {row["class"]: (row["scheme"], row["num_modules"]) for row in last_line(out)["modules"]}
    assert counts == {
        "experts": ("INT8 channel", 48),
        "shared": ("INT8 channel", 6),
        "dense": ("INT4 group 16", 3),
    }


def test_like_proves_the_quantiser_and_copies_the_scheme(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "model", "--scheme", "nvfp4", "--modules", "experts+attention")
    status, out, _ = run(tmp_path / "made", "--like", tmp_path / "model", "--json")
    assert status == 0
    report = last_line(out)
    assert report["proof"]["num_differing_bytes"] == 0
    assert report["proof"]["num_modules"] == 97
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "made")]
    assert same[0] == same[1]


def test_attention_may_be_stored_as_another_builds_experts(run: Run, source: Path, tmp_path: Path) -> None:
    run(tmp_path / "model", "--scheme", "nvfp4")
    words = ("--like", tmp_path / "model", "--modules", "attention", "--like-source", source)
    status, out, _ = run(tmp_path / "made", *words, of=tmp_path / "model")
    assert status == 0
    assert out.startswith("0 of ")
    before = load_file(str(tmp_path / "model" / "model.safetensors"))
    after = load_file(str(tmp_path / "made" / "model.safetensors"))
    kept = [name for name in before if "self_attn" not in name or "norm" in name or "g_proj" in name]
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in kept)
    assert "model.layers.0.self_attn.o_proj.weight_packed" in after


def test_differing_bytes_are_a_failed_check(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "model", "--scheme", "nvfp4")
    name = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    codes = load_file(str(tmp_path / "model" / "model.safetensors"))[name] ^ 1
    change_tensors(tmp_path / "model", **{name.replace(".", "__"): codes})
    status, out, err = run(tmp_path / "made", "--like", tmp_path / "model")
    assert status == 1
    assert out.startswith(f"{codes.numel()} of ")
    assert "1 linears differ, such as model.layers.1.mlp.experts.0.up_proj" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs --scheme, --rule or --like"),
        (("--scheme", "nvfp5"), "scheme 'nvfp5' is unknown; did you mean 'nvfp4'?"),
        (("--scheme", "int4"), "groups of 128"),
        (("--scheme", "nvfp4", "--modules", "attn"), "modules 'attn' are unknown"),
        (("--scheme", "nvfp4", "--rule", "re:.*zzz=int8"), "matches no linear"),
        (("--scheme", "nvfp4", "--rule", "int8"), "expected PATTERN=SCHEME"),
        (("--scheme", "nvfp4", "--like", "nano"), "leave out --scheme and --rule"),
        (("--scheme", "nvfp4", "--text", "x"), "need --check"),
        (("--scheme", "nvfp4", "--check", "--text", "nowhere.txt"), "cannot be read as UTF-8 text"),
        (("--scheme", "nvfp4", "--check", "--target", "nano"), "is a target: check it with --text"),
        (("--modules", "attention", "--rule", "dense=int8"), "--modules needs --scheme or --like"),
        (("--scheme", "nvfp4", "--like-source", "nano"), "--like-source needs --like"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    run: Run, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    status, out, err = run(tmp_path / "made", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(tmp_path.iterdir())


def _config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def _header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the entry of one tensor in a file's header."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header["model.layers.0.self_attn.q_proj.weight"])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def _link_to_itself(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")


def _change(**tensors: Any) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, **tensors)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors: truncated: found",
    ),
    "wrong offsets": (
        lambda f: _header(f, lambda entry: entry["data_offsets"].reverse()),
        "tensor 'model.layers.0.self_attn.q_proj.weight' has data_offsets",
    ),
    "wrong type": (
        lambda f: _header(f, lambda entry: entry.update(dtype="bfloat16")),
        "q_proj.weight' has the unknown type 'bfloat16'",
    ),
    "another shape": (
        _change(model__layers__0__self_attn__q_proj__weight=torch.ones(3, 32, dtype=torch.bfloat16)),
        "tensor 'model.layers.0.self_attn.q_proj.weight': found shape [3, 32], expected",
    ),
    "a tensor lost": (
        _change(model__layers__1__mlp__experts__3__up_proj__weight=None),
        "tensor 'model.layers.1.mlp.experts.3.up_proj.weight' is missing",
    ),
    "not a number, quantised": (
        _change(
            model__layers__1__mlp__experts__3__up_proj__weight=torch.full(
                (16, 32), torch.nan, dtype=torch.bfloat16
            )
        ),
        "tensor 'model.layers.1.mlp.experts.3.up_proj.weight': 512 or more values are not finite",
    ),
    "infinite, copied": (
        _change(model__norm__weight=torch.full((32,), -torch.inf, dtype=torch.bfloat16)),
        "tensor 'model.norm.weight': not all values are finite; expected all",
    ),
    "a link to itself": (
        _link_to_itself,
        "model.safetensors: cannot be read: Too many levels of symbolic links",
    ),
    "no kind of model": (lambda f: _config(f, model_type=None), "'model_type' must be 'laguna', found None"),
    "another kind of model": (
        lambda f: _config(f, architectures=["LlamaForCausalLM"]),
        "'architectures' must be ['LagunaForCausalLM']",
    ),
    "fewer layers": (lambda f: _config(f, num_hidden_layers=3), "'layer_types' must be a list with"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_source_is_one_line_and_leaves_nothing(
    damage: Callable[[Path], object], said: str, run: Run, tmp_path: Path
) -> None:
    folder = write_target(tmp_path / "source")
    damage(folder)
    status, out, err = run(tmp_path / "made", "--scheme", "nvfp4", of=folder)
    assert (status, out) == (2, "")
    assert err.startswith(f"lean-laguna: error: {tmp_path}")
    assert err.count("\n") == 1
    assert said in err
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_place_that_cannot_be_written_is_one_line(run: Run) -> None:
    status, out, err = run("/proc/made", "--scheme", "nvfp4")
    assert (status, out) == (2, "")
    assert err.startswith("lean-laguna: error: cannot write /proc/made: ")
    assert err.count("\n") == 1


def test_other_links_that_lead_nowhere_or_to_themselves_are_left_out(run: Run, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "source")
    (folder / "loop").symlink_to("loop")
    (folder / "here").symlink_to(".")
    (folder / "gone").symlink_to("nowhere")
    assert run(tmp_path / "made", "--scheme", "nvfp4", of=folder)[0] == 0
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == ["config.json", "model.safetensors"]
