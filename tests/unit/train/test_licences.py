import pytest

from lean_laguna.train.licences import classify_licence, mentions_copyleft

OSI = "License :: OSI Approved :: "


@pytest.mark.parametrize(
    ("expression", "classifiers", "text", "expected"),
    [
        ("MIT", [], None, "MIT"),
        ("Apache-2.0 AND MIT", [], None, "Apache-2.0 AND MIT"),
        ("MIT OR GPL-2.0-only", [], None, "MIT"),
        ("BSD-3-Clause AND Zlib", [], None, None),
        ("GPL-3.0-or-later", [OSI + "MIT License"], None, None),
        ("Apache-2.0 WITH LLVM-exception", [], None, None),
        ("(MIT OR Apache-2.0) AND MPL-2.0", [], None, None),
        (None, [OSI + "BSD License", "Programming Language :: Python"], None, "BSD"),
        (None, [OSI + "MIT License", OSI + "GNU Lesser General Public License v3 (LGPLv3)"], None, None),
        (None, [OSI + "Mozilla Public License 2.0 (MPL 2.0)"], "MIT", None),
        (None, [OSI + "BSD License"], "LGPL", None),
        (None, ["License :: OSI Approved"], "BSD 3-Clause License", "BSD-3-Clause"),
        (None, [], "The MIT License (MIT)", None),
        (None, [], "Apache License, Version 2.0", "Apache-2.0"),
        (None, [], "GPLv3", None),
        (None, [], "UNKNOWN", None),
        (None, [], None, None),
        (None, [], "Permission is hereby granted, free of charge, to any person" + " x" * 200, "MIT"),
    ],
)
def test_only_permissive_metadata_is_accepted(expression, classifiers, text, expected):
    assert classify_licence(expression, classifiers, text) == expected


@pytest.mark.parametrize(
    "head", ["# GNU General Public License", "# licensed under the LGPL-2.1", "# MPL 2.0", "CC-BY-NC"]
)
def test_copyleft_headers_are_seen(head):
    assert mentions_copyleft(head)


def test_a_plain_header_is_not_copyleft():
    assert not mentions_copyleft("# Copyright 2020, licensed under the MIT License\nimport argparse\n")
