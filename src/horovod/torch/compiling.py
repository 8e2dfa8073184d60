"""torch.compile beside horovod: collectives stay outside of compiled graphs."""

from __future__ import annotations

import sys

__all__ = ["keep_out_of_graphs"]

_done = False


def keep_out_of_graphs() -> None:
    """Make torch.compile call horovod's functions as they are instead of looking inside them.

    It would find that out by itself, function by function, with a warning for each. Does nothing while
    torch's compiler is not loaded, which takes longer than all of horovod's start; making any optimizer loads it.
    """
    global _done
    if _done or "torch._dynamo" not in sys.modules:
        return
    # Not a public name: where a version of torch has it elsewhere, there are the warnings.
    rules = sys.modules.get("torch._dynamo.trace_rules")
    add = getattr(rules, "add", None)
    if add is not None:
        add("horovod")
        _done = True
