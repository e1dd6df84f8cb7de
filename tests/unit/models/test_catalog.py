import pytest

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models import catalog
from lean_laguna.models.catalog import default_drafter, resolve_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "hub"


def download(hub, *files, commit="abc123", ref="main"):
    snapshot = hub / "models--poolside--Laguna-XS.2" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir(exist_ok=True)
    (refs / ref).write_text(commit)
    return snapshot


def test_a_built_in_name_is_its_packaged_folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(catalog.BUILT_IN, "nano", catalog.CatalogEntry(tmp_path, "target", "nano-dflash"))
    assert resolve_model("nano") == tmp_path
    assert default_drafter("nano") == "nano-dflash"


def test_a_folder_is_itself_and_must_hold_a_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="found a file"):
        resolve_model(tmp_path / "config.json")


def test_a_downloaded_repository_is_found_in_the_cache(hub):
    snapshot = download(hub, "config.json", "model.safetensors")
    assert resolve_model("poolside/Laguna-XS.2") == snapshot
    assert resolve_model("poolside/Laguna-XS.2@abc123") == snapshot


def test_a_revision_by_name_is_pinned(hub):
    old = download(hub, "config.json", "model.safetensors", commit="old", ref="v1")
    download(hub, "config.json", "model.safetensors", commit="new")
    assert resolve_model("poolside/Laguna-XS.2@v1") == old


def test_a_repository_that_is_not_here_names_the_download_command(hub):
    with pytest.raises(CheckpointError, match=r"run: hf download poolside/Laguna-XS\.2$"):
        resolve_model("poolside/Laguna-XS.2")
    with pytest.raises(CheckpointError, match=r"hf download poolside/Laguna-XS\.2 --revision v9"):
        resolve_model("poolside/Laguna-XS.2@v9")


def test_a_partly_downloaded_repository_is_refused(hub):
    download(hub, "config.json")
    with pytest.raises(CheckpointError, match="only partly"):
        resolve_model("poolside/Laguna-XS.2")


def test_the_cache_variables_are_honoured_in_hugging_face_s_order(hub, tmp_path, monkeypatch):
    snapshot = download(tmp_path / "elsewhere", "config.json", "model.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert resolve_model("poolside/Laguna-XS.2") == snapshot


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nanno", "unknown model 'nanno'; did you mean 'nano'"),
        ("zzz", "known: nano, nano-dflash"),
        ("./nowhere/model", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_a_name_that_means_nothing_says_what_would(hub, name, message):
    with pytest.raises(CheckpointError, match=message):
        resolve_model(name)


def test_published_targets_know_their_drafter():
    assert default_drafter("poolside/Laguna-XS-2.1@main") == "poolside/Laguna-XS-2.1-DFlash"
    assert default_drafter("/some/folder") is None


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(CheckpointError, match="no model has the name"):
        resolve_model(name)


@pytest.mark.parametrize("typed", ["{}/my-nvfp5", "my-nvfp5", "./my-nvfp5", "sub/my-nvfp5"])
def test_a_folder_of_almost_the_name_is_pointed_at(typed, tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "my-nvfp4", tmp_path / "sub" / "my-nvfp4", tmp_path / "my-nvfp55"):
        folder.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "sub"):  # the third is no checkpoint
        (folder / "my-nvfp4" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"; did you mean '.*my-nvfp4'\?"):
        resolve_model(typed.format(tmp_path))
