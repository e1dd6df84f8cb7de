import json

import pytest

from lean_laguna.cli.main import main
from lean_laguna.models.shapes import laguna_shape


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(laguna_shape("laguna-s-2.1").to_dict()))
    return folder


def test_a_new_folder_gets_the_other_context(source, tmp_path, capsys):
    assert main(["convert", "context", str(source), str(tmp_path / "new"), "--to", "256k", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["changed"]["max_position_embeddings"] == [1048576, 262144]
    assert "1m → 256k" in err
    assert json.loads((tmp_path / "new" / "config.json").read_text())["max_position_embeddings"] == 262144


def test_in_place_needs_to_be_said(source, capsys):
    assert main(["convert", "context", str(source), "--to", "256k"]) == 2
    assert "a destination folder, or --in-place" in capsys.readouterr().err
    assert main(["convert", "context", str(source), "--to", "256k", "--in-place"]) == 0
    assert main(["convert", "context", str(source), "--to", "256k", "--in-place"]) == 2
    assert "the context is 256k already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a source folder and --to"),
        (["nano", "new", "--to", "2m"], "must be one of 1m, 256k"),
        (["nano", "new", "--to", "1m"], "published for Laguna-S-2.1 alone"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "context", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
