import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.spec.draft_length import DraftLengthController
from lean_laguna.spec.draft_profile import load_profile, save_profile
from support.machine import Machine, run


def learned():
    paper = Machine(lambda k, b, c: 0.1 * (k > 0), lambda k, b, c: 1 + 0.1 * k, lambda c: [0.7] * 7)
    controller = DraftLengthController(7)
    run(paper, controller, 100)
    return controller


def test_a_saved_profile_is_read_back_as_it_was(tmp_path):
    controller = learned()
    path = tmp_path / "profile.json"
    save_profile(controller.to_dict(), path)
    save_profile(controller.to_dict(), path)
    assert load_profile(path) == controller.to_dict()
    again = DraftLengthController(7, profile=load_profile(path))
    assert again.to_dict() == controller.to_dict()
    assert again.choose(1, 10) >= 3, "three and four are best, and seven is about as good"
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_nothing_half_written_is_left_when_saving_fails(tmp_path):
    path = tmp_path / "profile.json"
    save_profile({"version": 1}, path)
    with pytest.raises(TypeError):
        save_profile({"version": object()}, path)
    assert load_profile(path) == {"version": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "must hold a JSON object, found list")],
)
def test_an_unreadable_profile_is_named(tmp_path, text, says):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
