import json

import pytest

from lean_laguna.cli.main import main
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.models.drafter_checkpoint import save_drafter
from support.drafters import random_drafter, zlab_json


def test_a_drafter_is_written_in_another_format(tmp_path, capsys):
    save_drafter(random_drafter(zlab_json()), tmp_path / "a", format="z-lab")
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--format", "speculators", "--json"]
    assert main(["convert", "drafter", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["after"] == "speculators"
    assert "z-lab → speculators" in err
    assert DFlashConfig.from_file(tmp_path / "b").format == "speculators"


def test_the_built_in_drafter_is_checked_against_its_target(tmp_path, capsys):
    words = ["nano-dflash", str(tmp_path / "b"), "--format", "laguna", "--target", "nano"]
    assert main(["convert", "drafter", *words]) == 0
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a source, a destination folder and --format"),
        (["nano-dflash", "new", "--format", "zlab"], "must be one of laguna, z-lab, speculators, deepspec"),
        (["nano-dflash", "new", "--format", "z-lab"], "it has a norm per tapped layer"),
        (["nano", "new", "--format", "z-lab"], "this is a target"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "drafter", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not list(tmp_path.iterdir())
