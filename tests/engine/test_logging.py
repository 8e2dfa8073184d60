"""HOROVOD_LOG_LEVEL, HOROVOD_LOG_HIDE_TIME, and who prints what when the script logs by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import run

SCRIPT = """
import logging
{before}
import horovod.numpy as hvd
hvd.init()
{after}
log = logging.getLogger("horovod")
log.debug("a debug message")
log.info("some information")
log.warning("first line\\nsecond line")
"""


def output(tmp_path: Path, before: str = "", after: str = "", **environ: str) -> list[str]:
    """Return the output of a script of one rank."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=before, after=after))
    code, text = run([sys.executable, str(script)], tmp_path, **environ)
    assert code == 0, text
    return text.splitlines()


def test_warnings_are_printed_with_time_and_rank_in_every_line(tmp_path: Path) -> None:
    first, second = output(tmp_path)
    stamp, _, rest = first.partition(" horovod[0] ")
    assert rest == "WARNING: first line"
    assert len(stamp) == len("2025-01-01 12:00:00,123")
    assert second == "horovod[0]   second line"


@pytest.mark.parametrize(
    ("level", "heads"), [("debug", ["DEBUG", "INFO", "WARNING"]), ("info", ["INFO", "WARNING"]), ("error", [])]
)
def test_the_level_and_no_time(tmp_path: Path, level: str, heads: list[str]) -> None:
    lines = output(tmp_path, HOROVOD_LOG_LEVEL=level, HOROVOD_LOG_HIDE_TIME="1")
    assert [line.split(":")[0] for line in lines if "   " not in line] == [f"horovod[0] {head}" for head in heads]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_logs_by_itself_is_left_alone(tmp_path: Path, when: str) -> None:
    lines = output(tmp_path, **{when: "logging.basicConfig(format='mine: %(message)s')"})
    assert lines == ["mine: first line", "second line"]


def test_a_handler_of_the_logger_is_enough(tmp_path: Path) -> None:
    mine = (
        "h = logging.StreamHandler(); h.setFormatter(logging.Formatter('mine: %(message)s'));"
        "logging.getLogger('horovod').addHandler(h)"
    )
    assert output(tmp_path, mine) == ["mine: first line", "second line"]


def test_a_root_logger_keeps_its_level_and_a_level_that_was_asked_for_counts(tmp_path: Path) -> None:
    mine = "logging.basicConfig(level=logging.INFO, format='mine: %(message)s')"
    assert output(tmp_path, mine)[0] == "mine: some information"
    assert output(tmp_path, mine, HOROVOD_LOG_LEVEL="debug")[0] == "mine: a debug message"


def test_unknown_variables_are_told_once_and_by_rank_0_only(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import horovod.numpy as hvd\nhvd.init(); hvd.shutdown(); hvd.init()\n")
    code, text = run(["horovodrun", "-np", "2", "python", str(script)], tmp_path, HOROVOD_FUSION_TRESHOLD="1")
    assert code == 0, text
    [line] = [line for line in text.splitlines() if "TRESHOLD" in line]
    assert line.startswith("[0]<stderr>:")
    assert line.endswith(
        "horovod[0] WARNING: HOROVOD_FUSION_TRESHOLD is not a setting of this version; "
        "did you mean HOROVOD_FUSION_THRESHOLD?"
    )
