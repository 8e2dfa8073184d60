"""Options of an elastic job, given as flags or as arguments of ``horovod.run``. Pure."""

from __future__ import annotations

import itertools
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horovod.core.membership_events import Policy

__all__ = ["FLAGS", "ElasticOptions", "argument_options", "cool_down_range", "elastic_options", "seconds"]

FLAGS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("--min-np", "--min-num-proc"), "N", "fewest processes to go on with (default: -np)"),
    (("--max-np", "--max-num-proc"), "N", "most processes (default: -np; unlimited with a script)"),
    (("--host-discovery-script",), "COMMAND", "prints the hosts that may be used now, one host:slots a line"),
    (("--slots-per-host", "--slots"), "N", "slots of a host for which the script prints no number (default: 1)"),
    (("--reset-limit",), "N", "most generations after the first one; then the job ends (default: no limit)"),
    (("--blacklist-cooldown-range",), "MIN MAX",
     "seconds until a host on which a process failed is used again; doubles to MAX (default: 1 600)"),
    (("--spares",), "N", "processes that wait, loaded, to take the place of one that is lost (default: 0)"),
    (("--chaos",), "TIME", "mean time between kills of a random rank, such as 30s, to try a script"),
)  # fmt: skip
"""Names of each flag, of its values, and its help."""

_ARGUMENTS = {
    "-np": "num_proc",
    "-H": "hosts",
    "--min-np": "min_num_proc",
    "--max-np": "max_num_proc",
    "--host-discovery-script": "host_discovery_script",
    "--slots-per-host": "slots",
    "--reset-limit": "reset_limit",
    "--blacklist-cooldown-range": "cooldown_range",
}
_COOL_DOWN_S = (1.0, 600.0)
_LONGEST_COOL_DOWN_S = 3600.0
_UNLIMITED = 1 << 20
_TIME = re.compile(r"([0-9]*\.?[0-9]+)(ms|s|m|h)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@dataclass(frozen=True)
class ElasticOptions:
    """An elastic job."""

    num_proc: int  # number of ranks that the start waits for
    minimum: int  # fewest ranks to go on with
    maximum: int  # most ranks
    script: str = ""  # command that prints the hosts that may be used now, or empty
    slots: int = 1  # slots of a host for which it prints no number
    reset_limit: int | None = None  # number of generations after the first one; None for no limit
    # time until a host is used again on which a process failed, and its limit
    cool_down_s: tuple[float, float] = _COOL_DOWN_S
    spares: int = 0  # processes beyond `maximum` that wait
    chaos_s: float = 0.0  # mean time between two ranks that are killed to try the script; 0 for never

    def policy(self, timeout_s: float, start_timeout_s: float) -> Policy:
        """Return the policy of the membership; ``start_timeout_s`` limits all waiting before the first generation."""
        return Policy(
            size=self.num_proc,
            minimum=self.minimum,
            maximum=self.maximum,
            resets=self.reset_limit,
            cool_down_s=self.cool_down_s,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            is_discovering=bool(self.script),
            spares=self.spares,
        )


def elastic_options(found: Mapping[str, Any], num_proc: int | None, allocated: int = 0) -> ElasticOptions | None:
    """Read the user's options, given as texts or numbers by the first name of the flag in ``FLAGS``; None when the job
    is not to be elastic. Without ``num_proc`` it starts on the ``allocated`` slots.

    Raises:
        ValueError: a wrong value, or values that contradict each other; names the flag.
    """
    given = {name: value for name, value in found.items() if value is not None}
    if empty := [name for name, value in given.items() if value == ""]:
        raise ValueError(f"{empty[0]} is empty; leave it out, or give a value")
    minimum = _number(given, "--min-np", 1)
    maximum = _number(given, "--max-np", 1)
    script = str(given.get("--host-discovery-script", ""))
    if minimum is None and maximum is None and not script:
        if given:
            raise ValueError(f"{', '.join(given)}: for elastic jobs; add --min-np, or --host-discovery-script")
        return None
    num_proc = num_proc or max(min(allocated, maximum or allocated), minimum or 0)
    if not num_proc:
        raise ValueError("-np is missing: say how many processes to start with, or --min-np")
    minimum = num_proc if minimum is None else minimum
    maximum = maximum or (_UNLIMITED if script else num_proc)
    limits = ("--min-np", minimum), ("-np", num_proc), ("--max-np", maximum)
    for (lower, least), (upper, most) in itertools.combinations(limits, 2):
        if least > most:
            raise ValueError(f"{lower} {least} is more than {upper} {most}")
    if "--slots-per-host" in given and not script:
        raise ValueError("--slots-per-host is for hosts of --host-discovery-script; give the slots with -H host:slots")
    return ElasticOptions(
        num_proc=num_proc,
        minimum=minimum,
        maximum=maximum,
        script=script,
        slots=_number(given, "--slots-per-host", 1) or 1,
        reset_limit=_number(given, "--reset-limit", 0),
        cool_down_s=cool_down_range(given.get("--blacklist-cooldown-range"), "--blacklist-cooldown-range"),
        spares=_number(given, "--spares", 0) or 0,
        chaos_s=_duration(given["--chaos"]) if "--chaos" in given else 0.0,
    )


def argument_options(num_proc: int | None, **given: Any) -> ElasticOptions | None:
    """Read the arguments of a function; like ``elastic_options``, but errors name arguments. None if the job is not
    elastic.

    Raises:
        ValueError: a wrong value, or values that contradict each other.
    """
    flags = {argument: flag for flag, argument in _ARGUMENTS.items()}
    try:
        return elastic_options({flags[name]: value for name, value in given.items()}, num_proc)
    except ValueError as error:
        said = re.sub(r"(?<!\S)--?[a-zA-Z-]+", lambda found: _ARGUMENTS.get(found[0], found[0]), str(error))
        raise ValueError(said) from None


def _number(given: Mapping[str, Any], flag: str, least: int) -> int | None:
    if flag not in given:
        return None
    text = str(given[flag])
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{flag} must be a whole number of at least {least}; received {text!r}")
    return int(text)


def cool_down_range(given: Any, name: str) -> tuple[float, float]:
    """Read the seconds until a host on which a process failed is used again, and their limit; also from text.

    Raises:
        ValueError: not two numbers in order, or out of range; names the option.
    """
    try:
        least, most = (float(value) for value in given or _COOL_DOWN_S)
        if 0 < least <= most <= _LONGEST_COOL_DOWN_S:
            return least, most
    except (TypeError, ValueError):
        pass
    received = " ".join(map(str, given)) if isinstance(given, (tuple, list)) else repr(given)
    raise ValueError(
        f"{name} must be two numbers of seconds, the smaller one first, above 0 and at most "
        f"{_LONGEST_COOL_DOWN_S:g}; received {received}"
    )


def seconds(given: Any, name: str) -> Any:
    """Return a time limit, unchanged; None stands for the default.

    Raises:
        ValueError: not a number, negative or infinite; names the option.
    """
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if given is None or (is_number and 0 <= given < math.inf):
        return given
    raise ValueError(f"{name} must be a number of seconds, at least 0; received {given!r}")


def _duration(text: Any) -> float:
    found = _TIME.fullmatch(str(text).strip())
    if found is None or not float(found[1]):
        raise ValueError(f"--chaos must be a time such as 30s, 2m or 500ms; received {text!r}")
    return float(found[1]) * _UNITS[found[2]]
