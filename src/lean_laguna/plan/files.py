"""Whether a checkpoint folder is whole: every shard, every tensor, nothing half-downloaded.

Reads headers only; ``check_hashes`` alone reads the weights. All that is wrong is collected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.files import is_there, parse_json, sha256_file
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.safetensors_header import read_header
from lean_laguna.plan.inventory import SchemeByName, plain_name
from lean_laguna.plan.modules import Module, target_modules

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<i>\d{5})-of-(?P<n>\d{5})\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LISTED = 3
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointFiles:
    """What a checkpoint folder holds.

    Attributes:
        folder: The folder.
        shards: Its safetensors files, readable or not.
        header: Every tensor of those that can be read.
        problems: What is wrong, one line each; empty where the folder is whole.
        unread: Files that are missing or damaged, whose tensors are not in ``header``.
    """

    folder: Path
    shards: tuple[Path, ...]
    header: Mapping[str, Entry]
    problems: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.stat().st_size for shard in self.shards if shard.exists())


def read_files(folder: Path) -> CheckpointFiles:
    """Read all headers of a folder and check them against its index, their own sizes and each other."""
    problems = [f"{path.name}: a download that never ended" for path in _incomplete(folder)]
    promised = _index(folder, problems)
    single = folder / "model.safetensors"
    # As the loader chooses: what the index names, else the one file, else all.
    shards = sorted(folder / name for name in set(promised.values()))
    if not shards:
        shards = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not shards:
        problems.append("no *.safetensors file: only the configuration is here")
    problems += _gaps([shard.name for shard in shards])
    header: dict[str, Entry] = {}
    owner: dict[str, str] = {}
    unread: list[str] = []
    for shard in shards:
        if not shard.exists():
            count = sum(name == shard.name for name in promised.values())
            problems.append(f"{shard.name}: missing; the index promises {count} tensors in it")
            unread.append(shard.name)
            continue
        try:
            found = read_header(shard)
        except CheckpointError as error:
            problems.append(str(error).replace(f"{folder}/", ""))
            unread.append(shard.name)
            continue
        problems += [f"{shard.name}: '{n}' is also in {owner[n]}" for n in found if n in owner][:_LISTED]
        header |= found
        owner |= dict.fromkeys(found, shard.name)
    if promised:
        problems += _disagreements(promised, owner, {shard.name for shard in shards} - set(unread))
    return CheckpointFiles(folder, tuple(shards), header, tuple(problems), tuple(unread))


def missing_tensors(config: LagunaConfig, scheme_of: SchemeByName, header: Mapping[str, Entry]) -> list[str]:
    """Return what a target of this config needs and the headers lack or have in another shape.

    Args:
        config: The target.
        scheme_of: How its config says that a module is stored, by ``plain_name``.
        header: All tensors found.
    """
    found = {plain_name(name): entry["shape"] for name, entry in header.items()}
    wrong: list[str] = []
    absent: list[str] = []
    for module in target_modules(config):
        for name, shape in _tensors_of(module, scheme_of).items():
            if name not in found:
                if not _is_fused(module, found):
                    absent.append(name)
            elif shape is not None and list(found[name]) != list(shape):
                wrong.append(f"'{name}' has shape {found[name]}, expected {list(shape)}")
    if absent:
        rest = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        wrong.insert(0, f"tensor '{absent[0]}'{rest} is missing; the config describes it")
    return wrong[: _LISTED + 1]


def check_hashes(
    files: CheckpointFiles, on_progress: Callable[[int, int, str], None] | None = None
) -> dict[str, tuple[str, bool | None]]:
    """Hash every shard.

    Args:
        files: The folder.
        on_progress: Called before each file with files done, files, and its name.

    Returns:
        Per file its SHA-256 and whether it is what the publisher stored; None where Hugging Face's cache does
        not say.
    """
    found: dict[str, tuple[str, bool | None]] = {}
    for i, shard in enumerate(files.shards):
        if not shard.exists():
            continue
        if on_progress is not None:
            on_progress(i, len(files.shards), shard.name)
        digest, published = sha256_file(shard), published_sha256(shard)
        found[shard.name] = (digest, None if published is None else digest == published)
    return found


def published_sha256(file: Path) -> str | None:
    """Return the SHA-256 that the repository states for a file, from what its download left behind.

    Source: huggingface_hub: files of a cache are links to ``blobs/SHA256``; a local folder keeps the same in
    ``.cache/huggingface/download/NAME.metadata``, on the second line.
    """
    if file.is_symlink():
        name = file.resolve().name
        return name if _SHA256.fullmatch(name) else None
    metadata = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        lines = metadata.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None


def _incomplete(folder: Path) -> list[Path]:
    download = folder / ".cache" / "huggingface" / "download"
    places = [folder.glob("*.incomplete"), download.glob("*.incomplete")]
    if folder.parent.name == "snapshots":
        places.append((folder.parent.parent / "blobs").glob("*.incomplete"))
    return sorted(path for place in places for path in place)


def _index(folder: Path, problems: list[str]) -> dict[str, str]:
    file = folder / INDEX
    if not is_there(file):
        return {}
    try:
        promised = parse_json(file.read_text(encoding="utf-8"))["weight_map"]
        outside = next((shard for shard in promised.values() if Path(str(shard)).name != shard), None)
        if outside is not None:
            problems.append(f"{INDEX}: names the file {outside!r}; expected files of its own folder")
        return {str(name): str(shard) for name, shard in promised.items() if outside is None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{INDEX}: cannot be read as a weight index: {error!r}")
        return {}


def _gaps(names: list[str]) -> list[str]:
    """Return the shards that the numbers in the names of the others promise."""
    families: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            families.setdefault((match["stem"], int(match["n"])), set()).add(int(match["i"]))
    problems = []
    for (stem, count), found in families.items():
        lost = [i for i in range(1, count + 1) if i not in found]
        if lost:
            listed = ", ".join(map(str, lost[:_LISTED])) + (" ..." if len(lost) > _LISTED else "")
            problems.append(f"{stem}-*-of-{count:05}.safetensors: {len(lost)} of {count} missing: {listed}")
    return problems


def _disagreements(promised: Mapping[str, str], owner: Mapping[str, str], present: set[str]) -> list[str]:
    lost = [n for n, shard in promised.items() if shard in present and owner.get(n) != shard]
    extra = [n for n in owner if n not in promised]
    problems = []
    if lost:
        problems.append(
            f"{promised[lost[0]]}: {len(lost)} tensors of the index are not there, '{lost[0]}' first"
        )
    if extra:
        problems.append(f"{INDEX}: does not list {len(extra)} tensors of the files, '{extra[0]}' first")
    return problems


def _tensors_of(module: Module, scheme_of: SchemeByName) -> dict[str, tuple[int, ...] | None]:
    """Return the tensors of a module; the shape is None where the format leaves it open."""
    name = plain_name(module.name)
    scheme = scheme_of(name) if module.is_linear else None
    if scheme is None:
        return {name if name.endswith("_bias") else f"{name}.weight": module.shape}
    specs = scheme.tensors(module.shape[0], module.shape[1])
    open_shapes = (
        "weight_scale",
        "input_scale",
        "weight_global_scale",
        "input_global_scale",
        "weight_scale_2",
    )
    return {
        f"{name}.{leaf}": None if leaf in open_shapes and spec.shape == (1,) else spec.shape
        for leaf, spec in specs.items()
    }


def _is_fused(module: Module, found: Mapping[str, Any]) -> bool:
    """True for a single expert whose layer stores all experts in one tensor."""
    if module.module_class != "experts":
        return False
    prefix, _, part = plain_name(module.name).rpartition(".")
    bank = prefix.rpartition(".")[0]
    fused = "down_proj" if part == "down_proj" else "gate_up_proj"
    return f"{bank}.{fused}" in found or f"{bank}.{fused}.weight" in found
