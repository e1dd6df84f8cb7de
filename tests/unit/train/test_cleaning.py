import ast

from lean_laguna.train.cleaning import (
    Deduplicator,
    NgramFilter,
    clean_text,
    documented_functions,
    parse_module,
    reject_reason,
)

GOOD = '"""A module."""\n\n' + "\n".join(
    f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(12)
)


def test_a_leading_licence_comment_is_cut_and_other_comments_stay():
    assert clean_text("#!/usr/bin/python\n# Copyright X. License: MIT\n\nimport os  \n") == "import os\n"
    assert clean_text("# What this does\nimport os\n") == "# What this does\nimport os\n"


def test_plain_code_is_kept_and_bad_files_are_named():
    assert reject_reason(GOOD, clean_text(GOOD)) is None
    assert reject_reason("x = 1\n", "x = 1\n") == "size"
    assert reject_reason("# GPL\n" + GOOD, GOOD) == "licence in header"
    assert reject_reason("# DO NOT EDIT\n" + GOOD, GOOD) == "generated"
    table = "TABLE = [\n" + "    12, 13, 14,\n" * 100 + "]\n"
    assert reject_reason(table, table) == "data table"
    wide = GOOD + "x = '" + "a" * 1200 + "'\n"
    assert reject_reason(wide, wide) == "long lines"


def test_python_2_does_not_parse():
    assert parse_module("print 'x'\n") is None
    assert isinstance(parse_module("print('x')\n"), ast.Module)


def test_exact_and_near_copies_are_refused_and_the_first_survives():
    seen = Deduplicator(max_line_overlap=0.6)
    assert not seen.is_duplicate(GOOD)
    assert seen.is_duplicate(GOOD)
    assert seen.is_duplicate(GOOD + "\n\nNEW_LINE_OF_SOME_LENGTH = 1\n")
    assert not seen.is_duplicate(GOOD.replace("function", "other").replace("argument", "value"))


def test_a_shared_13_gram_is_found_wherever_it_stands():
    words = [f"word{i}" for i in range(40)]
    ngrams = NgramFilter([" ".join(words)], 13)
    assert ngrams.matches("before = 1\n" + " ".join(words[20:33]) + " after")
    assert ngrams.matches("(" + ", ".join(w.upper() for w in words[3:16]) + ")")
    assert not ngrams.matches(" ".join(words[20:32]) + " other words here that go on and on and on and on")
    assert not ngrams.matches("")


def test_documented_functions_become_instruction_and_code_without_the_docstring():
    text = (
        "def area(width, height):\n"
        '    """Return the area of a rectangle.\n\n    More.\n    """\n'
        "    if width < 0:\n        raise ValueError\n    return width * height\n"
    )
    (pair,) = documented_functions(text, ast.parse(text))
    assert pair[0] == "Return the area of a rectangle"
    assert "More" not in pair[1]
    compile(pair[1], "x", "exec")
