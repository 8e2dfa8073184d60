"""One-line errors of actors, with actor, node and rank."""

from __future__ import annotations

import re
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, RayActorError, RayTaskError

from horovod.errors import LaunchError

__all__ = ["LOST", "how_lost", "is_node_lost", "lost_rank", "traceback_text"]

LOST = (RayActorError, NodeDiedError)
"""Errors of a call whose actor is gone, or out of reach."""
_KILLED = "its process has died: killed by a signal or by the kernel for its memory, or crashed"
_ADVICE = "; Ray's logs of its node say more (ray logs cluster)"


def how_lost(error: BaseException) -> str:
    """Return the cause of an actor's loss as text, such as "died: its node is lost".

    Args:
        error: one of ``LOST``.
    """
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        return "cannot be reached: its node or the network has failed"
    if is_node_lost(error):
        return "died: its node is lost"
    if isinstance(error, ActorDiedError) and getattr(error, "actor_init_failed", False):
        return f"could not be made: {text.strip().splitlines()[-1]}"
    if "never ran" in text:
        return "was never started: there was no room for it, or it was killed before"
    pid = re.search(r"pid: (\d+)", text)
    if "worker process has died" in text:
        return f"died{f' (pid {pid[1]})' if pid else ''}: {_KILLED}{_ADVICE}"
    last = [line.strip() for line in text.splitlines() if line.strip()]
    return f"died: {last[-1].rstrip('.') if last else type(error).__name__}"  # a sentence of ours goes on


def is_node_lost(error: BaseException) -> bool:
    """Return whether an actor was lost with its node.

    Args:
        error: one of ``LOST``.
    """
    is_dead = re.search(r"node (has )?died|node was terminated|node is dead", str(error), re.IGNORECASE)
    return isinstance(error, NodeDiedError) or is_dead is not None


def lost_rank(who: str, error: BaseException) -> LaunchError:
    """Return the error for a job that has lost an actor.

    Args:
        who: the rank, with its actor and node.
        error: one of ``LOST``.
    """
    found = LaunchError(f"{who} {how_lost(error)}\nshutdown() and start() make new workers")
    found.__cause__ = error
    return found


def traceback_text(error: Any) -> str:
    """Return the remote traceback of an error as Python prints it; empty when there is none.

    Args:
        error: error raised by a call of an actor.
    """
    if not isinstance(error, RayTaskError):
        return ""
    lines = str(error).splitlines()[1:]  # the first line names the call and its process
    # Ray leaves its own frames out, but not the marks below their lines.
    return "\n".join(["Traceback (most recent call last):", *(line for line in lines if line.strip(" ^~") or not line)])
