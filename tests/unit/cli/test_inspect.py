import json
import shutil
import subprocess
import sys

import pytest

from lean_laguna.cli.main import main
from lean_laguna.models.catalog import BUILT_IN


def test_the_built_in_model_is_whole_and_the_last_line_is_json(capsys):
    assert main(["inspect", "nano", "--card", "h200", "--drafter", "nano-dflash", "--hashes", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["kind"], found["files"]["problems"]) == ("inspect", [])
    assert len(found["files"]["hashes"]) == found["files"]["num_shards"]
    assert "one token reads" in err


def test_a_damaged_checkpoint_is_status_1_and_named(tmp_path, capsys):
    folder = tmp_path / "nano"
    shutil.copytree(BUILT_IN["nano"].folder, folder)
    next(folder.glob("model-00002*")).unlink()
    assert main(["inspect", str(folder), "--bandwidth", "273"]) == 1
    assert "model-00002-of-00002.safetensors: missing" in capsys.readouterr().out


def test_a_config_alone_is_enough(capsys):
    config = str(BUILT_IN["nano"].folder / "config.json")
    assert main(["inspect", config, "--bandwidth", "4.8TB/s", "--rows", "1,16", "--kv-dtype", "fp8"]) == 0
    assert "from its config.json alone" in capsys.readouterr().out


def test_headers_are_read_without_torch():
    code = (
        "import sys; from lean_laguna.cli.main import main; "
        "status = main(['inspect', 'nano', '--card', 'gb10', '--drafter', 'nano-dflash']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a checkpoint, or --shape"),
        (["nano", "--shape", "laguna-xs"], "one of the two"),
        (["nano", "--scheme", "nvfp4"], "--scheme says how a --shape is stored"),
        (["--shape", "laguna-xs", "--card", "h200", "--bandwidth", "3"], "leave one out"),
        (["--shape", "laguna-xs", "--card", "h2000"], "did you mean 'h200'"),
        (["--shape", "laguna-xs", "--bandwidth", "fast"], "--bandwidth must be a bandwidth"),
        (["--shape", "laguna-xs", "--card", "h200", "--hashes"], "--hashes needs a checkpoint folder"),
        (["--shape", "laguna-xs", "--rows", "1,9999999999"], "must be a whole number from 1 to 4096"),
        (["--shape", "laguna-xs", "--overlap", "2"], "must be a number from 0 to 1"),
        (["--shape", "laguna-xs", "--acceptance", "0.5,0.9"], "must be shares from 0 to 1 that do not rise"),
        (["nano-dflash", "--card", "h200"], "this is a drafter"),
        (["nowhere", "--card", "h200"], "unknown model 'nowhere'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words, said, capsys):
    assert main(["inspect", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
