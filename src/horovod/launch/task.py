"""The program of a rank of ``horovod.run``: fetches the function, calls it, and leaves the result.

Function and result travel in anonymous memory that only the caller and this process have open: nothing is left on
disk, nothing listens, and no data that a stranger could have written is unpickled.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from horovod.files import read_all
from horovod.launch.plan import FDS_VARIABLE
from horovod.pickling import pickled
from horovod.tracebacks import shorten

__all__ = ["Failure", "Result", "main", "pack_call", "unpack_result"]


@dataclass(frozen=True)
class Result:
    """The function's return value."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """The function's exception."""

    summary: str  # type and message in one line
    traceback: str  # as Python prints it
    packed: bytes  # the pickled exception, apart from the text: the caller may lack its class; empty if not picklable

    @property
    def error(self) -> BaseException | None:
        """The exception; None if it cannot be read here."""
        try:
            found = cloudpickle.loads(self.packed)
        except Exception:  # unpickling runs the objects' own code
            return None
        return found if isinstance(found, BaseException) else None


def pack_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], paths: list[str]) -> bytes:
    """Serialize a call so that another process, which finds the caller's modules in ``paths``, can make it. The result
    is a line of JSON with ``paths``, then the pickled call.
    """
    return json.dumps(paths).encode() + b"\n" + pickled((func, args, kwargs))


def unpack_result(data: bytes) -> Result | Failure | None:
    """Read the result that ``main`` has written; None when there is none."""
    found: Result | Failure | None = cloudpickle.loads(data) if data else None
    return found


def _failure(error: BaseException) -> Failure:
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without our own frame
    shorten(error)
    text = "".join(traceback.format_exception(error))
    summary = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SystemExit) and not error.code:
        summary = "the function ended with sys.exit(0) instead of returning"
    try:
        return Failure(summary, text, bytes(cloudpickle.dumps(error)))
    except Exception:
        return Failure(summary, text, b"")


def _name_of(value: Any) -> str:
    """Describe an object that cannot be sent; of a container, also the element to blame."""
    name = f"an object of type {type(value).__name__}"
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        try:
            cloudpickle.dumps(part)
        except Exception:
            return f"{name} with {_name_of(part)} in it"
    return name


def _call(call: bytes) -> tuple[bytes, int]:
    """Make the call; return the packed result and the exit code."""
    paths, _, pickled = call.partition(b"\n")
    sys.path[:] = [*json.loads(paths), *(p for p in sys.path if p not in json.loads(paths))]
    try:
        func, args, kwargs = cloudpickle.loads(pickled)
        value = func(*args, **kwargs)
    except BaseException as error:
        failure = _failure(error)
        # Python sets these when it prints an error; at exit we report them to the other ranks.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.stderr.write(failure.traceback)
        code = error.code if isinstance(error, SystemExit) else 1
        return bytes(cloudpickle.dumps(failure)), code if isinstance(code, int) and code else 1
    try:
        return bytes(cloudpickle.dumps(Result(value))), 0
    except Exception as error:  # pickling runs the objects' own code
        why = f"{type(error).__name__}: {error}"
        what = f"the function returned {_name_of(value)}, which cannot be sent to the caller ({why})"
        failure = Failure(f"{what}; return plain data instead, such as numbers, arrays or a state_dict", "", b"")
        sys.stderr.write(f"{failure.summary}\n")
        return bytes(cloudpickle.dumps(failure)), 1


def main() -> int:
    """Entry point of the process; 0 when the function returned and its result could be sent."""
    call_fd, result_fd = (int(fd) for fd in os.environ.pop(FDS_VARIABLE).split(","))
    for fd in (call_fd, result_fd):
        os.set_inheritable(fd, False)
    call = read_all(call_fd)
    os.close(call_fd)
    data, code = _call(call)
    with open(result_fd, "wb") as file:
        file.write(data)
    return code


if __name__ == "__main__":
    # Run under the module's real name, so that the caller can find the classes that are pickled here.
    from horovod.launch import task

    sys.exit(task.main())
