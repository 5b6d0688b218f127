"""Writes docs/reference/ anew from the code: every part with its keys, every command.

python scripts/make_reference.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
sys.path.insert(1, str(ROOT / "src"))


def main() -> int:
    from treetune.cli.pages import make_pages

    texts = make_pages()  # by file name
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(texts)} pages in {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
