import hashlib
import subprocess
import sys

import pytest

from lean_laguna.core.errors import DataError
from lean_laguna.train.sources import fetch_wheels, normalise_name, read_wheel, standard_library
from support.wheels import make_wheel


def test_a_wheel_is_identified_by_its_metadata(tmp_path):
    path = make_wheel(tmp_path, "Some.Package", "1.2", {}, "License-Expression: MIT")
    found = read_wheel(path)
    assert (found.name, found.version, found.licence) == ("some-package", "1.2", "MIT")


@pytest.mark.parametrize(
    ("line", "licence"),
    [
        ("License: Apache-2.0", "Apache-2.0"),
        ("Classifier: License :: OSI Approved :: BSD License", "BSD"),
        ("License-Expression: GPL-3.0-only", None),
        ("Summary: no word about it", None),
    ],
)
def test_the_licence_is_read_from_any_of_its_fields(tmp_path, line, licence):
    assert read_wheel(make_wheel(tmp_path, "p", "1", {}, line)).licence == licence


@pytest.mark.parametrize("content", [b"not a zip", None])
def test_a_file_that_is_no_wheel_is_named(tmp_path, content):
    path = tmp_path / "p-1-py3-none-any.whl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"p-1-py3-none-any\.whl' is not a readable wheel"):
        read_wheel(path)


def test_files_come_in_path_order_without_vendored_copies_and_other_encodings(tmp_path):
    files = {
        "p/b.py": "\ufeffx = 1\r\ny = 2\r",
        "p/a.py": "a = 1\n",
        "p/_vendor/q.py": "q = 1\n",
        "p/third_party/r.py": "r = 1\n",
        "p/latin.py": "ä = 1\n".encode("latin-1"),
        "p/data.json": "{}",
        "p/tests/test_a.py": "assert 1\n",
    }
    found = list(read_wheel(make_wheel(tmp_path, "p", "1", files, "License: MIT")).files())
    assert [f.path for f in found] == ["p/a.py", "p/b.py", "p/tests/test_a.py"]
    assert found[1].text == "x = 1\ny = 2\n"
    assert found[1].sha256 == hashlib.sha256("\ufeffx = 1\r\ny = 2\r".encode()).hexdigest()
    assert [f.is_test for f in found] == [False, False, True]


def test_the_standard_library_is_one_distribution():
    found = standard_library()
    assert (found.name, found.licence) == ("python-stdlib", "PSF-2.0")
    assert found.version.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert next(found.files()).path < "b"


def test_names_are_normalised():
    assert normalise_name("Ruamel.Yaml__x") == "ruamel-yaml-x"


def test_only_missing_wheels_are_fetched_and_a_failure_is_reported(tmp_path, monkeypatch):
    make_wheel(tmp_path, "here-already", "1.0", {})
    asked, lines = [], []

    def pip(command, **options):
        asked.append(command[-1])
        failed = command[-1].startswith("gone")
        return subprocess.CompletedProcess(command, int(failed), "", "first line\nno such release\n")

    monkeypatch.setattr(subprocess, "run", pip)
    missing = fetch_wheels(["here-already==1.0", "here-already==2.0", "gone==1"], tmp_path, lines.append)
    assert asked == ["here-already==2.0", "gone==1"]
    assert missing == ["gone==1"]
    assert lines == ["fetched 2 of 3: here-already==2.0", "not fetched: gone==1: no such release"]
