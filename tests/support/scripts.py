"""Scripts run as ranks whose framework is loaded already: what they print, without waiting for its import."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from harness import Ranks

__all__ = ["run_script"]


def _script(script: str, folder: str, arguments: Sequence[str], number: int) -> tuple[int, str, str]:
    """Be ``python script arguments``; return the exit code and what was printed to both streams."""
    texts = [Path(folder) / f"{stream}.{number}.{os.environ['HOROVOD_RANK']}" for stream in ("stdout", "stderr")]
    os.chdir(folder)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    code = 0
    for descriptor, text in enumerate(texts, 1):
        file = os.open(text, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code, *(text.read_text(encoding="utf-8", errors="backslashreplace") for text in texts)


def run_script(
    script: Path, np: int, folder: Path, framework: str, arguments: Sequence[str] = (), **environ: str
) -> tuple[int, str]:
    """Run a script on fresh ranks, as ``horovodrun -np NP python script`` does but for the launcher.

    Args:
        script: the file.
        np: number of ranks.
        folder: where it runs; its output is kept there, too.
        framework: which the ranks have loaded, as in ``harness``.
        arguments: of the script.
        **environ: variables besides the present ones.

    Returns:
        The largest exit code, and what was printed, each line after ``[rank]<stdout>:`` or ``[rank]<stderr>:``.
    """
    number = len(list(folder.glob("stdout.*")))
    call = (str(script), str(folder), arguments, number)
    ranks = Ranks(np, _script, call, env=environ, init=False, framework=framework)
    outcomes = ranks.outcomes()
    lines: list[str] = []
    for outcome in outcomes:
        if outcome.value is None:
            return 1, f"rank {outcome.rank} ended with {outcome.exitcode}\n{outcome.text}"
        for stream, text in zip(("stdout", "stderr"), outcome.value[1:], strict=True):
            lines += [f"[{outcome.rank}]<{stream}>:{line}" for line in text.splitlines()]
    return max(outcome.value[0] for outcome in outcomes), "\n".join(lines)
