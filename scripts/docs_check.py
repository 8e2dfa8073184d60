"""Check a built site: every public name has an entry, and no page loads anything from the network.

usage: python scripts/docs_check.py SITE
"""

from __future__ import annotations

import importlib
import re
import sys
import zlib
from pathlib import Path

MODULES = (
    "horovod.launch.run", "horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras",
    "horovod.jax", "horovod.numpy", "horovod.popart", "horovod.data", "horovod.errors",
)  # fmt: skip


def main(site: Path) -> int:
    """Print what is wrong; return 1 if there is anything."""
    raw = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(raw).decode().splitlines()}
    wrong = []
    for module in MODULES:
        names = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
        # Modules have a page of their own, with their names.
        wrong += [f"no entry for {name}" for name in names if name not in known and name not in sys.modules]
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        wrong += [
            f"{page} loads {url}" for url in re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="(https?:[^"]+)', text)
        ]
    print("\n".join(wrong[:40]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
