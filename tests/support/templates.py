"""Chat templates in the two layouts that Laguna checkpoints use, in our own words."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "chat_templates"
SOURCES = {name: (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("early", "later")}
