import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.train import recipe_files
from lean_laguna.train.recipe_files import find_recipe


def test_a_name_is_found_in_the_checkout_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("nano/target").parts[-3:] == ("recipes", "nano", "target.toml")


def test_a_path_is_taken_as_it_is(tmp_path):
    (tmp_path / "mine.toml").write_text("")
    assert find_recipe(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"other\.toml': no such file"):
        find_recipe(str(tmp_path / "other.toml"))


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown recipe 'nano/targt'; did you mean 'nano/target'"):
        find_recipe("nano/targt")


def test_an_installed_package_says_where_recipes_are(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_files, "recipe_folders", list)
    with pytest.raises(ConfigError, match=r"recipes/ of the project's source tree.*path of a \.toml file"):
        find_recipe("nano/target")
