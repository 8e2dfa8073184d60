"""The state of an elastic job in a file, for the next start; written when too few ranks have survived.

The file holds numbers, texts, dicts, lists and arrays, and is read without pickle: reading it runs no code.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from horovod.files import create_file
from horovod.logs import logger

__all__ = ["check", "newest", "read", "remove", "write"]

_NAME = re.compile(r"elastic-(\d{12})\.state")
_DRAFT = re.compile(_NAME.pattern + r"\..*\.part")
_MAGIC = b"khorovod state 1\n"
_ALIGN = 64


def check(folder: str) -> None:
    """Create a folder if needed, and raise an OSError if no file can be created there."""
    draft = _draft(folder, 0)
    os.close(create_file(draft))
    draft.unlink(missing_ok=True)


def newest(folder: str) -> tuple[Path, int] | None:
    """Return the checkpoint with the most progress in a folder, and its progress; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        found = [(int(match[1]), path) for path in Path(folder).iterdir() if (match := _NAME.fullmatch(path.name))]
        if found:
            progress, path = max(found)
            return path, progress
    return None


def remove(folder: str, up_to: int) -> None:
    """Remove the checkpoints in a folder that have at most this progress, and those whose writer was killed."""
    for path in Path(folder).glob("elastic-*"):
        # A rank that is one step behind may still write its draft.
        for name, limit in (_NAME, up_to), (_DRAFT, up_to - 1):
            if (match := name.fullmatch(path.name)) and int(match[1]) <= limit:
                path.unlink(missing_ok=True)


def write(folder: str, progress: int, values: Mapping[str, Any]) -> Path:
    """Write a checkpoint atomically, and remove checkpoints with less progress.

    Args:
        folder: target folder; it is created if needed.
        progress: number of completed steps; several ranks may write the same number.
        values: the values that ``read`` will return. Values of other types than those above are skipped with a warning.

    Raises:
        OSError: the file cannot be written.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    tree = _packed(dict(values), arrays, "")
    kinds = [[_name(array.dtype), list(array.shape)] for array in arrays]
    header = json.dumps({"values": tree, "arrays": kinds}).encode()
    draft = _draft(folder, progress)
    path = draft.with_name(f"elastic-{progress:012d}.state")
    try:
        with open(create_file(draft), "wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            for array in arrays:
                file.write(bytes(-file.tell() % _ALIGN))
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    remove(folder, progress - 1)
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the values that ``write`` stored.

    Raises:
        ValueError: the file is damaged, or is not a checkpoint.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    start = len(_MAGIC) + 8
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("it does not begin as one")
        end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        header = json.loads(data[start:end])
        arrays = []
        for kind, shape in header["arrays"]:
            end += -end % _ALIGN
            array = np.empty(shape, np.dtype(kind))
            raw = np.frombuffer(data, np.uint8, array.nbytes, end)
            array.reshape(-1).view(np.uint8)[:] = raw
            arrays.append(array)
            end += array.nbytes
        values: dict[str, Any] = _unpacked(header["values"], arrays)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a state of an elastic job ({error}); remove it to begin anew") from None
    return values


def _draft(folder: str, progress: int) -> Path:
    return Path(folder) / f"elastic-{progress:012d}.state.{os.uname().nodename}.{os.getpid()}.part"


def _name(dtype: np.dtype[Any]) -> str:
    # ``dtype.str`` does not identify dtypes that other packages added to numpy, such as bfloat16.
    return str(dtype.str if np.dtype(dtype.str) == dtype else dtype.name)


def _is_known(dtype: np.dtype[Any]) -> bool:
    """Whether ``read`` finds this dtype by its name; one with fields is not found."""
    try:
        return not dtype.hasobject and np.dtype(_name(dtype)) == dtype
    except TypeError:
        return False


class _Unknown(Exception):
    pass


def _packed(value: Any, arrays: list[np.ndarray[Any, Any]], place: str) -> Any:
    """Return a value in JSON form; arrays are replaced by their indices in ``arrays``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):  # other than an array it has a hash, and += does not change it
        return {"number": _packed(np.asarray(value), arrays, place)["array"]}
    if isinstance(value, np.ndarray) and _is_known(value.dtype):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        pairs = [[_packed(key, arrays, place), _try(item, arrays, f"{place}.{key}")] for key, item in value.items()]
        return {"dict": [pair for pair in pairs if pair[1] is not _Unknown]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, arrays, place) for item in value]}
    kind = f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise _Unknown(f"{place[1:]} is a {kind}")


def _try(value: Any, arrays: list[np.ndarray[Any, Any]], place: str) -> Any:
    count = len(arrays)
    try:
        return _packed(value, arrays, place)
    except _Unknown as error:
        del arrays[count:]
        logger.warning("the state is written without one of its values: %s, which the file cannot hold", error)
        return _Unknown


def _unpacked(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    if kind == "number":
        return arrays[content][()]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in content}
    items = [_unpacked(item, arrays) for item in content]
    return tuple(items) if kind == "tuple" else items
