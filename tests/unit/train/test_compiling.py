import pytest
import torch

from lean_laguna.core.errors import ConfigError
from lean_laguna.train import compiling
from lean_laguna.train.compiling import choose_compiled

CPU = torch.device("cpu")


def plain(x):
    return x


@pytest.fixture
def broken_compiler(monkeypatch):
    def fails(x):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED\nmore")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)


def choose(mode, lines, **options):
    return choose_compiled(
        (plain,), lambda f: f(1), name="step", device=CPU, mode=mode, report=lines.append, **options
    )


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_off_and_auto_without_a_gpu_never_compile(mode, broken_compiler):
    lines = []
    assert choose(mode, lines) is plain
    assert lines == []


def test_what_does_not_compile_runs_eagerly(broken_compiler):
    lines = []
    assert choose("on", lines) is plain
    assert "does not compile: RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED" in lines[0]


def test_a_broken_device_ends_the_run_and_says_what_to_do(broken_compiler, monkeypatch):
    monkeypatch.setattr(compiling, "_answers", lambda device: False)
    with pytest.raises(ConfigError, match=r"step broke the CUDA context.*--compile off"):
        choose("on", [])


def test_the_compiled_form_is_kept_where_asked(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda x: x)
    lines = []
    assert choose("on", lines, repeats=1) is not plain
    assert "variant 0 compiled" in lines[0]


def test_the_cpu_answers():
    assert compiling._answers(CPU)
