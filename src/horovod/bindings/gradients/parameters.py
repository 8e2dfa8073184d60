"""Check and normalize the user's settings of gradients: factors, passes, names and groups of parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horovod.bindings.misuse import is_integer, type_name, warn_deprecated, wrong_argument
from horovod.core.requests import ReduceOp
from horovod.phrases import few
from horovod.splits import split_evenly

__all__ = ["check_groups", "check_names", "check_passes", "find_duplicates", "groups_argument", "predivided"]


def find_duplicates(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def check_passes(passes: int) -> None:
    """Raise RequestError unless ``backward_passes_per_step`` is an integer, 1 or more."""
    if not is_integer(passes) or passes <= 0:
        raise wrong_argument(f"backward_passes_per_step must be an integer, 1 or more. Received: {passes!r}")


def predivided(op: ReduceOp, factor: float) -> tuple[float, float]:
    """Return the factors before and after a reduction for ``gradient_predivide_factor``.

    Raises:
        RequestError: the factor is not a number, not finite or 0; or there is one, and ``op`` is not Average.
    """
    try:
        divides = math.isfinite(factor) and factor != 0
    except TypeError:
        divides = False
    if not divides:
        raise wrong_argument(f"gradient_predivide_factor must be a finite number other than 0. Received: {factor!r}")
    if factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise wrong_argument(
            "gradient_predivide_factor needs op=Average. "
            f"Received: gradient_predivide_factor={factor}, op={op.name.capitalize()}"
        )
    return 1.0 / factor, float(factor)


def groups_argument(num_groups: int, groups: Any) -> Any:
    """Return the groups that ``groups`` or Horovod's older ``num_groups`` selects."""
    if num_groups:
        warn_deprecated("num_groups is deprecated, use groups instead")
    return (num_groups or None) if groups is None else groups


def check_names(parameters: Sequence[Any], named: Iterable[tuple[str, Any]] | None) -> list[tuple[str, Any]]:
    """Check and return the user's names; an empty list without names.

    Raises:
        RequestError: an entry is not a pair, a name occurs twice, or a parameter of the optimizer has no name.
    """
    if named is not None and not isinstance(named, Iterable):
        raise wrong_argument(
            "named_parameters must be pairs (name, parameter), such as model.named_parameters(). "
            f"Received: {type_name(named)}"
        )
    entries = list(named) if named is not None else []
    for entry in entries:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise wrong_argument(
                "named_parameters must be pairs (name, parameter), such as model.named_parameters(). "
                f"Received one that is {type(entry).__name__}"
            )
    if doubled := find_duplicates(name for name, _ in entries):
        raise wrong_argument(
            f"names in named_parameters must differ. Received several times: {few(sorted(doubled))}. For several "
            "models put something before the names, such as (f'encoder.{name}', parameter)"
        )
    known = {id(parameter) for _, parameter in entries}
    if entries and (unnamed := [parameter for parameter in parameters if id(parameter) not in known]):
        raise wrong_argument(
            f"named_parameters must name all of the optimizer's {len(parameters)} parameters, or be left out. "
            f"Received no name for {len(unnamed)}, the first one of shape {list(unnamed[0].shape)}, but names for "
            f"{few([name for name, _ in entries])}. Were they made from another model than the optimizer's?"
        )
    return entries


def in_words(groups: object) -> str:
    """Return a wrong ``groups`` for an error: of a list the types, because values of parameters fill the screen."""
    return repr([type(group).__name__ for group in groups] if isinstance(groups, list | tuple) else groups)


def check_groups(
    trained: Sequence[Any], groups: int | Sequence[Sequence[Any]] | None, is_parameter: Callable[[Any], bool]
) -> list[list[Any]] | None:
    """Return the user's groups as lists of parameters, or ``None``.

    Raises:
        RequestError: ``groups`` is neither a number nor a list of lists of parameters, or a parameter occurs twice.
    """
    if groups is None or (isinstance(groups, int) and groups == 0):
        return None
    if isinstance(groups, int) and groups > 0:
        return [[trained[index] for index in run] for run in split_evenly(len(trained), groups)]
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise wrong_argument(
            f"groups must be a number of groups, or a list of lists of parameters. Received: {in_words(groups)}"
        )
    seen: set[int] = set()
    for parameter in (parameter for group in groups for parameter in group):
        if not is_parameter(parameter):
            raise wrong_argument(f"groups must hold parameters. Received: {type(parameter).__name__}")
        if id(parameter) in seen:
            raise wrong_argument(f"a parameter of shape {list(parameter.shape)} is twice in groups; once is allowed")
        seen.add(id(parameter))
    return [list(group) for group in groups]
