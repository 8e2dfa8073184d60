"""``python -m poprun``."""

from __future__ import annotations

import sys

from poprun.cli import main

sys.exit(main())
