"""Print docs/environment.md, from the table of settings: ``python scripts/environment.py > docs/environment.md``."""

from __future__ import annotations

from horovod.config import JOB_ID, MEETING, MIB, RANK_VARIABLES, SECRET_KEY, SETTINGS, Setting, render

_PLACES = {
    "rank": "this process, from 0",
    "size": "number of ranks",
    "local_rank": "this process among the ranks of its host, from 0",
    "local_size": "number of ranks on this host",
    "cross_rank": "this host among those that have this local rank, from 0",
    "cross_size": "number of hosts that have this local rank",
    "hostname": "name of this host",
    "slot": "place on this host, which stays the same in an elastic job",
}


def _row(setting: Setting) -> str:
    flag = " / ".join(f"`{f}`" for f in (setting.flag, setting.flag_off) if f)
    if setting.scale == MIB:
        flag += " (MB)"
    default = render(setting.default) if setting.default != "" else "-"
    return (
        f"| `{setting.env}` | {default} | {setting.unit} | {flag} | `{setting.yaml_path}` | {setting.help} |".replace(
            " `` ", " "
        )
    )


def markdown() -> str:
    """The page ``docs/environment.md``."""
    head = ["| variable | default | unit | flag of horovodrun | YAML key | meaning |", "|---|---|---|---|---|---|"]
    lines = [
        "# Settings",
        "",
        "Generated from `src/horovod/config.py` by `python scripts/environment.py`; do not edit.",
        "",
        "The first of these wins: an explicit argument, then a flag, then the environment, then the YAML file of",
        "`--config-file`, then the default. Yes is 1, true, yes or on; no is 0, false, no, off or an empty text; any",
        "other word is an error. An unknown `HOROVOD_*` variable gets one warning with the nearest known name.",
        "",
        *head,
        *(_row(s) for s in SETTINGS if s.in_effect),
        "",
        "## Accepted, without effect in this version",
        "",
        *head,
        *(_row(s) for s in SETTINGS if not s.in_effect),
        "",
        "## Set by the launcher",
        "",
        "`horovodrun` gives these to each rank; under mpirun or torchrun, theirs are read instead.",
        "In an elastic job, each reset renews them, except host name and slot.",
        "",
        "| variable | meaning |",
        "|---|---|",
        *(f"| `{env}` | {_PLACES[name]} |" for name, env in RANK_VARIABLES.items()),
        f"| `{JOB_ID}` | name of the job on this host |",
        f"| `{MEETING}` | where the job service of several hosts listens, such as `tcp://10.0.0.1:4000` |",
        f"| `{SECRET_KEY}` | key of the job, hexadecimal; set it yourself only where an error asks for it |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
