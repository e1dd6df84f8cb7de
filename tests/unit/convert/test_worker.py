"""What a worker process says on its pipe."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

from lean_laguna.convert.part_converter import Conversion, Part
from lean_laguna.convert.shard_layout import shard_layout
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import open_source
from lean_laguna.convert.worker import serve
from lean_laguna.core.errors import ConfigError
from support.quantised import write_target


def asked(*messages: object) -> io.BytesIO:
    return io.BytesIO(b"".join(pickle.dumps(message) for message in messages))


def test_it_is_ready_answers_every_part_and_ends_with_the_pipe(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    (file,) = source.files()
    names = source.names_by_file()[file]
    writer = ShardWriter(tmp_path / file.name, shard_layout(source, names, {}))
    answers = io.BytesIO()
    serve(asked(Conversion(source, {}, tmp_path), Part(file, tuple(names), 0)), answers)
    writer.finish()
    answers.seek(0)
    assert answers.read(1) == b"\n"
    result, peak = pickle.load(answers)
    assert result == {}
    assert peak > 10e6
    assert answers.read() == b""
    assert (tmp_path / file.name).stat().st_size == writer.num_bytes


def test_errors_are_answers_too_and_faults_bring_their_traceback(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    (file,) = source.files()
    answers = io.BytesIO()
    parts = [Part(file, ("model.norm.weight",), 0), Part(tmp_path / "none", ("x",), 0)]
    serve(asked(Conversion(source, {}, tmp_path / "nowhere"), *parts), answers)
    answers.seek(1)
    error, _ = pickle.load(answers)
    assert isinstance(error, ConfigError)
    assert "cannot write" in str(error)
    fault, _ = pickle.load(answers)
    assert isinstance(fault, RuntimeError)
    assert "KeyError" in str(fault)


def test_nobody_who_listens_ends_it_quietly(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def flush(self) -> None:
            raise BrokenPipeError

    source = open_source(write_target(tmp_path / "source"))
    serve(asked(Conversion(source, {}, tmp_path)), Broken())
