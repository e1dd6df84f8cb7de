"""Takes results/page.png: the page at ``/`` after a run, in headless Chromium.

The speeds that it shows are measured on the spot, so the machine should have nothing else to do.

Usage: python scripts/page_picture.py [FILE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from server_overhead import serving  # noqa: E402

from support.chromium import browser  # noqa: E402

NUM_TOKENS = 140
NUM_RUNS = 2  # the first warms up


def main(target: Path) -> None:
    """Run the example greedily and take the picture."""
    with (
        serving("--seed", "0") as (_, client),
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder) / "profile") as tab,
    ):
        tab.resize(1240, 940)
        tab.open(f"{client.base_url}/")
        tab.wait("document.getElementById('model').textContent.startsWith('nano')")
        tab.run(f"document.getElementById('limit').value = {NUM_TOKENS}")
        tab.run("document.getElementById('heat').value = 0")
        for _ in range(NUM_RUNS):
            tab.run("document.getElementById('go').click()")
            tab.wait("document.getElementById('go').textContent === 'Stop'")
            tab.wait("document.getElementById('go').textContent === 'Run'")
        tab.screenshot(target)
        print(tab.run("document.getElementById('said').textContent"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "page.png")
