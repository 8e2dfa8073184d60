"""Pickles values with functions in them, for ranks on other hosts."""

from __future__ import annotations

import io
import pickle
import platform
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle

from horovod.errors import LaunchError

__all__ = ["pickled"]


def pickled(value: Any) -> bytes:
    """Pickle a value, with the functions and classes of a script or notebook in it."""
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Keeps the file of a function, so that errors name the user's line; cloudpickle drops it since 3.1.3. A Python of
    another version refuses the function.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        make, given = self.dispatch_table[CodeType](obj)
        return _code_of_file, (obj.co_filename, make, given, platform.python_version(), sys.implementation.cache_tag)


def _code_of_file(
    file: str, make: Callable[..., CodeType], given: tuple[Any, ...], version: str, cache_tag: str
) -> CodeType:
    if cache_tag != sys.implementation.cache_tag:  # its bytecode would crash, or do something else
        raise LaunchError(
            f"the function was sent from Python {version}, and {platform.node()} has {platform.python_version()} at "
            f"{sys.executable}, which cannot run its bytecode: install the same version of Python on all hosts"
        )
    return make(*given).replace(co_filename=file)
