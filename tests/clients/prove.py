"""Runs the clients people use against ``lean-laguna serve`` and writes down what each one printed.

Each client lives in a virtual environment of its own under ``.venv/clients``, since their pins conflict.
Nothing but the packages themselves is downloaded.

Usage: python tests/clients/prove.py [CLIENT...]; exit status 1 where a client failed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "clients"
HOMES = ROOT / ".venv" / "clients"
RESULTS = ROOT / "results" / "clients.md"
NANO = ROOT / "src" / "lean_laguna" / "assets" / "laguna-nano"
SERVE = ("serve", "nano", "--seed", "0", "--threads", "1")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SHOWN_LINES = 40
LIMIT_S = 600


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        words: The command; ``{url}``, ``{here}``, ``{nano}`` and ``{work}`` are filled in, and the first word
            is looked up in the client's environment.
        expected: What its output must match, each of them.
        environment: Variables it needs.
        is_online: It refuses to start where the hub is declared unreachable.
    """

    words: tuple[str, ...]
    expected: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    is_online: bool = False


CLIENTS = {
    "openai2": Client(("python", "{here}/with_openai.py", "{url}"), ("openai: 2\\.", "all as expected")),
    "openai3": Client(("python", "{here}/with_openai.py", "{url}"), ("openai: 3\\.", "all as expected")),
    "anthropic": Client(("python", "{here}/with_anthropic.py", "{url}"), ("all as expected",)),
    "lm-eval": Client(
        (
            *("lm_eval", "run", "--model", "local-completions", "--include_path", ".", "--model_args"),
            "model=nano,base_url={url}/v1/completions,tokenizer_backend=remote,tokenized_requests=True,max_length=2048",
            *("--tasks", "tiny_choice,tiny_rolling,tiny_generate", "--output_path", "{work}"),
        ),
        (r"tiny_choice .*acc +\|. +\| *1\.0", r"tiny_generate.*exact_match", r"tiny_rolling .*bits_per_byte"),
    ),
    "guidellm": Client(
        (
            *(
                "guidellm",
                "run",
                "--backend",
                "kind=openai_http,target={url},model=nano",
                "--disable-progress",
            ),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
            *(
                "--tokenizer",
                "kind=huggingface_auto,model={nano}",
                "--output",
                "kind=json,path={work}/out.json",
            ),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=32"),
        ),
        ("Benchmarking complete",),
    ),
    "aiperf": Client(
        (
            *("aiperf", "profile", "--model", "nano", "--url", "{url}", "--endpoint-type", "completions"),
            *("--streaming", "--tokenizer", "{nano}", "--request-count", "4", "--concurrency", "1"),
            *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "24", "--ui", "none"),
            *("--extra-inputs", "ignore_eos:true", "--artifact-dir", "{work}"),
        ),
        ("Output Sequence Length.* 24.00", "LLM Metrics: Spec Decode", "Acceptance Length"),
        is_online=True,
    ),
    "verifiers": Client(
        ("python", "{here}/with_verifiers.py", "{url}", "{nano}"),
        ("log-probabilities rescored within", "all as expected"),
    ),
    "mini-swe-agent": Client(
        ("sh", "run.sh", "{url}"),
        ("before: the test fails", r"\+    return a \+ b", "after: the test passes"),
        {
            "HOME": "{work}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}


def main(names: list[str]) -> int:
    """Run the named clients, or all, and write the results."""
    unknown = set(names) - set(CLIENTS)
    if unknown:
        print(f"unknown client {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    sections, failed = [], []
    commit = output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    with tempfolder() as work, serving(work) as (url, said):
        for name in names or CLIENTS:
            print(f"{name} ...", flush=True)
            is_right, section = prove(name, url, work)
            sections.append(section)
            failed += [] if is_right else [name]
            print(f"{name}: {'as expected' if is_right else 'FAILED'}", flush=True)
            if not is_right:
                print(section, flush=True)
    if names:
        return 1 if failed else 0
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = (
        f"# Clients against the server\n\nMade by `make clients` on {day}, commit {commit}, two CPU cores.\n"
    )
    head += f"\n    lean-laguna {' '.join(SERVE)} --port PORT\n    {said}\n\n"
    RESULTS.write_text(head + "\n".join(sections), encoding="utf-8")
    print(f"written: {RESULTS.relative_to(ROOT)}")
    return 1 if failed else 0


def prove(name: str, url: str, work: Path) -> tuple[bool, str]:
    """Run one client; returns whether it did as expected, and its part of the results."""
    client, home = CLIENTS[name], install(name)
    folder = work / name
    folder.mkdir()
    prepared = HERE / name.replace("-", "_")
    where = shutil.copytree(prepared, folder / "files") if prepared.is_dir() else folder
    places = {"url": url, "here": str(HERE), "nano": str(NANO), "work": str(folder)}
    words = [word.format(**places) for word in client.words]
    if (home / "bin" / words[0]).exists():
        words[0] = str(home / "bin" / words[0])
    environment = {**os.environ, "HF_HOME": str(work / "hub"), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    environment |= {
        "NO_COLOR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
    }
    if not client.is_online:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {key: value.format(**places) for key, value in client.environment.items()}
    done = subprocess.run(
        words,
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    text = CONTROL.sub("", done.stdout)
    missing = [pattern for pattern in client.expected if not re.search(pattern, text)]
    is_right = done.returncode == 0 and not missing
    verdict = "as expected" if is_right else f"FAILED: exit status {done.returncode}, not found: {missing}"
    versions = (ROOT / "requirements" / "clients" / f"{name}.txt").read_text(encoding="utf-8").split()
    command = " ".join(client.words)
    shown = "\n".join("    " + line for line in tail(text))
    shown = shown.replace(url, "URL").replace(str(work), "WORK").replace(str(ROOT), ".")
    return is_right, f"## {name}: {verdict}\n\n{', '.join(versions)}\n\n    $ {command}\n{shown}\n"


def tail(text: str) -> list[str]:
    """Return the last lines that say something; progress bars say nothing once they are done."""
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line.strip() and not line.endswith("it/s]")][-SHOWN_LINES:]


def install(name: str) -> Path:
    """Return the client's virtual environment, made where it is missing or its pins have changed."""
    home, pins = HOMES / name, ROOT / "requirements" / "clients" / f"{name}.txt"
    stamp = home / "installed.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != pins.read_text(encoding="utf-8"):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = (str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "-r", str(pins)], check=True)
        shutil.copy(pins, stamp)
    return home


@contextlib.contextmanager
def serving(work: Path) -> Iterator[tuple[str, str]]:
    """Run the server; yields its address and what it says when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", work / "server.txt"
    with log.open("w") as sink:
        command = (sys.executable, "-m", "lean_laguna.cli.main", *SERVE, "--port", str(port))
        server = subprocess.Popen(command, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while not answers(url):
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        yield url, log.read_text().splitlines()[-1].replace(url, "URL")
        assert answers(url), "the server is gone"
    finally:
        server.terminate()
        server.wait(60)


def answers(url: str) -> bool:
    """Say whether the server is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def tempfolder() -> Iterator[Path]:
    """Yield a folder for what clients write."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        yield Path(folder)


def output(*words: str) -> str:
    """Return what a command prints."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
