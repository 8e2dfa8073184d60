"""Old import path of small helpers that user scripts and tests take from Horovod."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

from horovod.splits import part_of

__all__ = [
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")

# Private in Horovod, too, but code outside of it uses this.
_cache = functools.cache

_FRAMEWORKS = ("torch", "tensorflow", "jax", "numpy")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework is installed here and supported. Imports nothing.

    Args:
        ext_base_name: name of the framework, such as ``torch``.
        verbose: whether to print the answer.

    Returns:
        True or False.
    """
    there = ext_base_name in _FRAMEWORKS and find_spec(ext_base_name) is not None
    if verbose:
        print(f"horovod.{ext_base_name} is {'available' if there else 'not available'}")
    return there


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ``ext_base_name`` moves tensors between GPUs; see ``cuda_built``."""
    return extension_available(ext_base_name, verbose) and bool(_built("cuda")() or _built("rocm")())


def _built(part: str) -> Callable[..., Any]:
    """Return the function that answers as ``horovod.torch`` does; imports late, so that this module loads no engine."""

    def built(verbose: bool = False) -> Any:
        from horovod.bindings import common_names

        return getattr(common_names, f"{part}_built")()

    return built


mpi_built = _built("mpi")
gloo_built = _built("gloo")
nccl_built = _built("nccl")
ddl_built = _built("ddl")
ccl_built = _built("ccl")


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for a while.

    Args:
        **kwargs: variable to text; ``None`` leaves the variable alone.
    """
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: value for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Make the function that turns the old ``average=`` argument into an ``op``.

    Args:
        reduce_ops: any object with ``Average`` and ``Sum``.

    Returns:
        ``impl(op, average)``; raises ValueError when both are given.
    """

    def impl(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op is not None:
            return op
        if average is None:
            return reduce_ops.Average
        from horovod.bindings.misuse import warn_deprecated  # this import loads the engine; the module alone does not

        warn_deprecated("Parameter `average` has been replaced with `op`")
        return reduce_ops.Average if average else reduce_ops.Sum

    return impl


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[T], n: int) -> list[list[T]]:  # noqa: E741 - Horovod's name
    """Cut a list into ``n`` parts of nearly the same length, the longer ones first.

    Args:
        l: the list.
        n: number of parts.

    Returns:
        The parts, in order.
    """
    return [l[slice(*part_of(len(l), n, index))] for index in range(n)]


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare two version numbers.

    Args:
        ver: a version, such as ``2.1.0+cpu``.
        target: three numbers, such as ``2.0.1``.

    Returns:
        Whether ``ver`` is at least ``target``.

    Raises:
        ValueError: a version is not text, or ``target`` does not have three numbers.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be text; received {ver!r} and {target!r}")
    wanted = target.split(".")
    if len(wanted) != 3 or not all(part.isdigit() for part in wanted):
        raise ValueError(f"the version to compare with must be of the form x.y.z; received {target!r}")
    return _numbers(ver) >= tuple(int(part) for part in wanted)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading three numbers of a version; missing ones are 0."""
    parts = [*version.split("+")[0].split("."), "", "", ""][:3]
    return tuple(int("".join(itertools.takewhile(str.isdigit, part)) or 0) for part in parts)
