"""What a rank has submitted and not executed: by name, and what has none in the order of submission."""

from __future__ import annotations

import collections

from horovod.engine.handles import Handle
from horovod.transports.base import Entry

__all__ = ["Outstanding"]


class Outstanding:
    """Submissions until they are matched with an entry of the log.

    Any thread may look, and change ``named`` in single steps; all else is the engine's.

    Attributes:
        named: by process set and name.
        unnamed: by process set; none of them is empty, so that to ask whether there are any is but one step.
    """

    __slots__ = ("named", "unnamed")

    def __init__(self) -> None:
        self.named: dict[tuple[int, str], Handle] = {}
        self.unnamed: dict[int, collections.deque[Handle]] = {}

    def add_unnamed(self, handle: Handle) -> None:
        """Add a submission that has no name, behind all others."""
        self.unnamed.setdefault(handle.signature.request.process_set, collections.deque()).append(handle)

    def match(self, entry: Entry) -> Handle:
        """Take out the submission that an entry of the log answers."""
        if entry.name is not None:
            return self.named.pop(entry.name)
        process_set = entry.response.process_set
        queue = self.unnamed[process_set]
        handle = queue.popleft()
        if not queue:
            del self.unnamed[process_set]
        return handle

    def put_back(self, handle: Handle) -> None:
        """Put a handle that could not be executed back, so that it fails with all others."""
        if handle.signature.name is not None:
            self.named[handle.signature.name] = handle
        else:
            process_set = handle.signature.request.process_set
            self.unnamed.setdefault(process_set, collections.deque()).appendleft(handle)

    def handles(self) -> list[Handle]:
        """Return all of them; for any thread, at any moment."""
        found = list(self.named.values())
        for queue in list(self.unnamed.values()):
            found += list(queue)
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self.named.clear()
        self.unnamed.clear()
