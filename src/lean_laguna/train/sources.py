"""Python source out of distributions: wheels in a folder and the standard library, with licence and checksum.

Nothing is imported or executed: wheels are read as zip archives, and files only parsed.
"""

from __future__ import annotations

import email.parser
import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lean_laguna.core.errors import DataError
from lean_laguna.train.licences import classify_licence

# Vendored copies have licences of their own, which the distribution's metadata does not state.
_VENDORED = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendored_packages|extern(al)?s?|third_?party|_distutils_hack)(/|$)", re.I
)
_TEST = re.compile(r"(^|/)(tests?|testing)(/|$)|(^|/)(test_[^/]*|[^/]*_test|conftest)\.py$", re.I)
# Parts of the standard library that are tables, copies of other projects, or not for reading.
_STDLIB_SKIP = (
    "site-packages/",
    "lib2to3/",
    "idlelib/",
    "turtledemo/",
    "encodings/",
    "ensurepip/",
    "pydoc_data/",
)


@dataclass(frozen=True)
class SourceFile:
    """One Python file as it stands in its distribution.

    Attributes:
        path: Path inside the distribution, with forward slashes.
        sha256: Of the file's bytes, before any clean-up.
        text: Its text, newlines normalised.
    """

    path: str
    sha256: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the path looks like a test module."""
        return _TEST.search(self.path) is not None


@dataclass(frozen=True)
class Distribution:
    """A distribution's identity and where its files are.

    Attributes:
        name: Normalised name (lower case, hyphens).
        version: As its metadata states it.
        licence: Permissive licence, or None where it may not be read.
        root: The wheel, or the standard library's folder.
    """

    name: str
    version: str
    licence: str | None
    root: Path

    def files(self) -> Iterator[SourceFile]:
        """Yield the distribution's own Python files in path order; vendored copies are left out."""
        if self.root.suffix == ".whl":
            with zipfile.ZipFile(self.root) as archive:
                for path in sorted(archive.namelist()):
                    if path.endswith(".py") and not _VENDORED.search(path):
                        yield from _source_file(path, archive.read(path))
        else:
            for file in sorted(self.root.rglob("*.py")):
                path = file.relative_to(self.root).as_posix()
                if not path.startswith(_STDLIB_SKIP):
                    yield from _source_file(path, file.read_bytes())


def normalise_name(name: str) -> str:
    """Return a distribution name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_wheel(path: Path) -> Distribution:
    """Identify a wheel from its metadata.

    Raises:
        DataError: The file is not a wheel.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
            metadata = email.parser.Parser().parsestr(archive.read(inside[0]).decode("utf-8", "replace"))
    except (zipfile.BadZipFile, IndexError, OSError) as error:
        raise DataError(f"'{path}' is not a readable wheel: {error}") from None
    licence = classify_licence(
        metadata.get("License-Expression"), metadata.get_all("Classifier") or [], metadata.get("License")
    )
    return Distribution(normalise_name(metadata["Name"]), metadata["Version"], licence, path)


def standard_library() -> Distribution:
    """Return the running interpreter's standard library."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Distribution("python-stdlib", version, "PSF-2.0", Path(sysconfig.get_paths()["stdlib"]))


def fetch_wheels(
    requirements: Sequence[str], folder: Path, report: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Download the pinned wheels that are not there yet with pip; one that fails is reported, not fatal.

    Args:
        requirements: ``name==version`` each.
        folder: Where wheels lie.
        report: Receives one line for each download.

    Returns:
        The requirements that could not be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for index, requirement in enumerate(requirements, 1):
        name, _, version = requirement.partition("==")
        stem = re.sub(r"[-_.]+", "_", name).lower()
        if any(
            re.sub(r"[-_.]+", "_", f.name.split("-")[0]).lower() == stem and f"-{version}-" in f.name
            for f in folder.glob("*.whl")
        ):
            continue
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", str(folder), requirement], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            missing.append(requirement)
            report(f"not fetched: {requirement}: {lines[-1]}")
        else:
            report(f"fetched {index} of {len(requirements)}: {requirement}")
    return missing


def _source_file(path: str, data: bytes) -> Iterator[SourceFile]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return  # other encodings are rare and mostly test data
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    yield SourceFile(path, hashlib.sha256(data).hexdigest(), text)
