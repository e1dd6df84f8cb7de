import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from lean_laguna.cli.interrupts import heard_interrupts

REPOSITORY = Path(__file__).resolve().parents[3]
SWALLOWING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


def run(folder, code):
    (folder / "swallowing.py").write_text(SWALLOWING)
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, cwd=folder, timeout=60
    )


def test_an_interrupt_that_an_import_swallows_ends_the_process(tmp_path):
    code = (
        "from lean_laguna.cli.interrupts import heard_interrupts\n"
        "with heard_interrupts('p: interrupted', 130):\n    import swallowing\nprint('went on')"
    )
    done = run(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\np: interrupted\n")


def test_a_command_hears_it(tmp_path):
    code = (
        "import sys, types\nfrom lean_laguna.cli import main as cli\n"
        "command = types.ModuleType('lean_laguna.cli.plan')\n"
        "def build_parser():\n    import swallowing\n"
        "command.build_parser = build_parser\nsys.modules['lean_laguna.cli.plan'] = command\n"
        "sys.exit(cli.main(['plan']))"
    )
    done = run(tmp_path, code)
    assert (done.returncode, done.stderr) == (130, "\nlean-laguna: interrupted\n")


def test_elsewhere_it_is_raised_and_the_handler_goes_as_it_came():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), heard_interrupts("", 1):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with heard_interrupts("", 1):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone():
    seen = []

    def work():
        with heard_interrupts("", 1):
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_interrupt_while_the_command_line_is_imported_is_one_line(tmp_path):
    """The entry point of the installed command, interrupted before the command line is there."""
    code = (
        "import os, signal, sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'lean_laguna.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\nsys.argv = ['lean-laguna', '--version']\n"
        "from lean_laguna.__main__ import main\nsys.exit(main())"
    )
    done = run(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nlean-laguna: interrupted\n")


def test_the_command_runs_and_hears_interrupts_as_before(tmp_path):
    code = (
        "import signal, sys\nsys.argv = ['lean-laguna', '--version']\n"
        "from lean_laguna.__main__ import main\nassert main() == 0\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    done = run(tmp_path, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lean-laguna ")


def test_the_installed_command_starts_there():
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lean-laguna": "lean_laguna.__main__:main"}
