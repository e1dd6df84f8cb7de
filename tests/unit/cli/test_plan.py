import json

import pytest

from lean_laguna.cli.main import main
from support.engines import tiny_config
from support.sparse_checkpoints import write_sparse_target

SPARK = ["--shape", "laguna-xs-2.1", "--scheme", "nvfp4", "--drafter", "laguna-xs-2.1", "--card", "gb10"]


def test_a_plan_that_fits_is_status_0_and_the_last_line_is_json(capsys):
    assert main(["plan", *SPARK, "--context", "262144", "--streams", "2", "--cap", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["lean_laguna"]["fits"]
    # A quantised build brings scales for FP8 keys and values, which vLLM then takes.
    assert found["vllm"]["kv_element_bytes"] == 1
    assert found["cap"].startswith("systemd-run --user --scope")
    assert "serve poolside/Laguna-XS-2.1 --drafter poolside/Laguna-XS-2.1-DFlash" in found["cap"]
    assert found["cap"] in err


def test_a_plan_that_does_not_fit_is_status_1_and_says_what_would(capsys):
    words = ["--shape", "laguna-s-2.1", "--memory", "96GB", "--context", "131072"]
    assert main(["plan", *words, "--no-prefix-caching", "--vllm-kv-dtype", "bfloat16", "--cap"]) == 1
    out, err = capsys.readouterr()
    assert "systemd-run" not in out
    assert "no cap: what does not fit must not be started" in err
    assert "does not fit" in out
    assert "weights stored as" in out


def test_the_built_in_model_is_planned_for_this_machine_as_its_engine_allocates(capsys):
    assert (
        main(["plan", "nano", "--drafter", "nano-dflash", "--streams", "3", "--dtype", "float32", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    from lean_laguna.engine.llm import LLM

    engine = LLM(
        "nano",
        speculative_config={"model": "nano-dflash"},
        device="cpu",
        max_num_seqs=3,
        kv_cache_memory_bytes=found["lean_laguna"]["kv_cache_memory_bytes"],
    ).engine
    assert engine.kv_bytes == found["lean_laguna"]["kv_cache_memory_bytes"]
    if not found["engine"]["is_on_gpu"]:
        weights = sum(parameter.nbytes for parameter in engine.target.parameters())
        assert found["lean_laguna"]["weights_bytes"] == weights


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a checkpoint, or --shape"),
        ([*SPARK, "--memory", "24GiB"], "leave one out"),
        (["--shape", "laguna-xs", "--memory", "some"], "--memory must be a size"),
        ([*SPARK, "--context", "1048576"], "at most the model's max_position_embeddings, 262144"),
        ([*SPARK, "--prefill-chunk-size", "100"], "must be a multiple of kv_block_size"),
        ([*SPARK, "--streams", "0"], "must be a whole number from 1"),
        (["--shape", "laguna-s-2.1", "--drafter", "laguna-xs", "--card", "h200"], "not made for this target"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words, said, capsys):
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_an_fp8_cache_takes_half_but_for_the_drafters_pages(capsys):
    found = {}
    for kind in ("auto", "fp8"):
        assert main(["plan", *SPARK, "--context", "65536", "--kv-cache-dtype", kind, "--json"]) == 0
        found[kind] = json.loads(capsys.readouterr().out)["lean_laguna"]
    whole, coded = (found[kind]["kv_bytes_by_layers"] for kind in ("auto", "fp8"))
    assert {name: size / coded[name] for name, size in whole.items()} == {
        "full": 2.0,
        "sliding": 2.0,
        "draft_sliding": 1.0,
    }
    assert "--kv-cache-dtype fp8" in found["fp8"]["flags"]
    assert "--kv-cache-dtype fp8" not in found["auto"]["flags"]


def test_a_checkpoint_that_is_not_whole_is_planned_from_its_config_and_says_so(capsys, tmp_path):
    config = tiny_config()
    whole, damaged = (write_sparse_target(tmp_path / name, config, num_shards=3) for name in ("a", "b"))
    shard = damaged / "model-00002-of-00003.safetensors"
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 7)
    weights = []
    for folder in (whole, damaged):
        assert main(["plan", str(folder), "--memory", "8GB", "--json"]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        weights.append(found["lean_laguna"]["weights_bytes"])
        assert ("is not whole" in err) == bool(found["problems"]) == (folder == damaged)
    assert weights[0] == weights[1]
    assert f"{damaged} is not whole: {shard.name}: truncated: found" in err
    assert "; see 'lean-laguna inspect'" in " ".join(err.split())
