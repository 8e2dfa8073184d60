"""Old import path of small helpers that user scripts and tests take from Horovod."""

from __future__ import annotations

import contextlib
import functools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from horovod.bindings.missing import explain
from horovod.errors import HorovodVersionMismatchError
from horovod.splits import part_of

__all__ = [
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
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

# Private in Horovod as well, and used outside of it all the same.
_cache = functools.cache

_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "numpy": "numpy"}


def get_ext_suffix() -> str:
    """Suffix of compiled modules of this Python; this package has none."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where Horovod would have its library; nothing is there.

    Args:
        pkg_path: a file of the package.
        *args: parts of the path; the last one lacks the suffix.

    Returns:
        A path.
    """
    *folders, name = args
    return str(Path(pkg_path).resolve().parent.joinpath(*folders, name + get_ext_suffix()))


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework is installed here and supported. Imports nothing.

    Args:
        ext_base_name: such as ``torch``.
        verbose: whether to print the answer.

    Returns:
        True or False.
    """
    framework = _FRAMEWORKS.get(ext_base_name)
    there = bool(framework and find_spec(framework) and _part_exists(ext_base_name))
    if verbose:
        print(f"horovod.{ext_base_name} is {'available' if there else 'not available'}")
    return there


def _part_exists(name: str) -> bool:
    return not explain(name) and find_spec(f"horovod.{name}") is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Refuse a framework that is not there.

    Args:
        ext_name: such as ``horovod.torch``.
        ext_env_var: accepted; there is nothing to build.
        pkg_path: accepted; there is nothing to build.
        *args: accepted; there is nothing to build.

    Raises:
        ImportError: the framework is not installed or not supported.
    """
    name = ext_name.removeprefix("horovod.").partition(".")[0]
    if not extension_available(name):
        raise ImportError(f"Extension {ext_name} is not available: {name} is not installed, or not supported yet")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ``ext_base_name`` moves tensors between GPUs; see ``cuda_built``."""
    return extension_available(ext_base_name, verbose) and bool(_built("cuda") or _built("rocm"))


def _built(part: str) -> bool | int:
    """Return the answer of ``horovod.torch`` and the like; imports late, so that this module loads no engine."""
    from horovod.bindings.job import JobFunctions

    answer: bool | int = getattr(JobFunctions(), f"{part}_built")()
    return answer


def mpi_built(verbose: bool = False) -> bool:
    """See ``horovod.torch.mpi_built``."""
    return bool(_built("mpi"))


def gloo_built(verbose: bool = False) -> bool:
    """See ``horovod.torch.gloo_built``."""
    return bool(_built("gloo"))


def nccl_built(verbose: bool = False) -> int:
    """See ``horovod.torch.nccl_built``."""
    return int(_built("nccl"))


def ddl_built(verbose: bool = False) -> bool:
    """See ``horovod.torch.ddl_built``."""
    return bool(_built("ddl"))


def ccl_built(verbose: bool = False) -> bool:
    """See ``horovod.torch.ccl_built``."""
    return bool(_built("ccl"))


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
        reduce_ops: anything with ``Average`` and ``Sum``.

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
        from horovod.bindings.misuse import warn_deprecated  # loads the engine, as this page alone does not

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
        n: how many parts.

    Returns:
        The parts, in order.
    """
    return [l[slice(*part_of(len(l), n, index))] for index in range(n)]


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    if isinstance(x, Iterable):
        return True
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
        ValueError: not a text, or ``target`` has not three numbers.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be text; received {ver!r} and {target!r}")
    wanted = target.split(".")
    if len(wanted) != 3 or not all(part.isdigit() for part in wanted):
        raise ValueError(f"the version to compare with must be of the form x.y.z; received {target!r}")
    return _numbers(ver) >= tuple(int(part) for part in wanted)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading three numbers of a version; what is missing is 0."""
    found = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        found.append(int(digits or 0))
    return tuple(found + [0] * (3 - len(found)))


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Compare with the version at build time; there was no build, so this never complains by itself.

    Args:
        name: the framework.
        version: its version now.
        exception: what went wrong at import, if anything.

    Raises:
        HorovodVersionMismatchError: ``exception`` was given.
    """
    if exception is not None:
        raise HorovodVersionMismatchError(name, version, version) from exception
