"""Code that depends on torch's internals: it keeps collectives out of the graphs of torch.compile.

Without those internals torch finds the collectives by itself, with a warning for each.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["keep_out_of_graphs"]

_RULES = "torch._dynamo.trace_rules"


class _Finder(importlib.abc.MetaPathFinder):
    """Adds a rule to those by which torch looks inside functions, as soon as that module of torch is loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return nothing for any other module."""
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if isinstance(spec, ModuleSpec) and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                _tell(module)

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


_finder = _Finder()
_is_told = False


def keep_out_of_graphs() -> None:
    """Make torch.compile call horovod's functions as they are instead of looking inside them.

    It would find that out by itself, function by function, with a warning for each. While torch's compiler is not
    loaded, which takes longer than all of horovod's start, this waits until it is.
    """
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _tell(rules)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _tell(rules: ModuleType) -> None:
    # Not a public name: where a version of torch has it elsewhere, there are the warnings.
    global _is_told
    add = getattr(rules, "add", None)
    if add is not None and not _is_told:
        _is_told = True
        add("horovod")
