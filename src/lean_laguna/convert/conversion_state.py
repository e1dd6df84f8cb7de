"""What of a conversion has been finished, on disk after every file, so that a killed one can go on."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from lean_laguna.convert.weight_encoder import WeightError
from lean_laguna.core.files import atomic_write_json, parse_json

STATE_FILE = "conversion.json"


@dataclass
class ConversionState:
    """Finished files and what is known of their linears.

    Attributes:
        fingerprint: Of the conversion: another one begins anew.
        files: Bytes of each finished file, by name.
        errors: Per linear of them, where asked for.
    """

    fingerprint: str
    files: dict[str, int] = field(default_factory=dict)
    errors: dict[str, WeightError] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into the unfinished folder."""
        errors = {module: dataclasses.astuple(error) for module, error in self.errors.items()}
        written = {"fingerprint": self.fingerprint, "files": self.files, "errors": errors}
        atomic_write_json(folder / STATE_FILE, written)

    @staticmethod
    def load(folder: Path, fingerprint: str) -> ConversionState:
        """Return the state of an earlier run of the same conversion, else a new one and no folder."""
        try:
            found = parse_json((folder / STATE_FILE).read_text(encoding="utf-8"))
            state = ConversionState(
                found["fingerprint"],
                {name: size for name, size in found["files"].items() if size_of(folder / name) == size},
                {module: WeightError(*values) for module, values in found["errors"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            state = ConversionState("")
        if state.fingerprint == fingerprint:
            return state
        shutil.rmtree(folder, ignore_errors=True)
        return ConversionState(fingerprint)


def size_of(file: Path) -> int:
    """Return a file's bytes, -1 where there is none."""
    return file.stat().st_size if file.exists() else -1
