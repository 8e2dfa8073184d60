"""Print docs/environment.md, from the table of settings: ``python scripts/environment.py > docs/environment.md``."""

from __future__ import annotations

from horovod.config import JOB_ID, MIB, RANK_VARIABLES, SECRET_KEY, SETTINGS, Setting, render


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
        "In an elastic job, each reset renews them, except the host name and the slot, which is the first local rank.",
        "",
        "| variable | meaning |",
        "|---|---|",
        *(f"| `{env}` | {name.replace('_', ' ')} of the process |" for name, env in RANK_VARIABLES.items()),
        f"| `{JOB_ID}` | name of the job on this host |",
        f"| `{SECRET_KEY}` | key of the job, hexadecimal; set it yourself only where an error asks for it |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
