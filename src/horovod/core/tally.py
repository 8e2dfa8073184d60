"""The numbers that each party has submitted, one bit each, and those that all its parties have.

Parties are the ranks of a host, or the hosts of a job. To see what is complete costs one AND for each of them, however
many numbers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Tally", "indices"]


class Tally:
    """See the module.

    Args:
        parties: all that there may be.

    Attributes:
        bits: what each party has submitted, and is not complete.
    """

    def __init__(self, parties: Iterable[int]) -> None:
        self.bits = dict.fromkeys(parties, 0)
        self._groups: dict[tuple[int, ...], int] = {}

    def enrol(self, bit: int, parties: Sequence[int]) -> None:
        """Let exactly these take part in a number."""
        group = tuple(parties)
        self._groups[group] = self._groups.get(group, 0) | bit

    def strike(self, bit: int, parties: Sequence[int]) -> None:
        """Forget a number, and who has submitted it."""
        group = tuple(parties)
        self.remove(bit, group)
        self._groups[group] &= ~bit
        if not self._groups[group]:
            del self._groups[group]

    def remove(self, bits: int, parties: Iterable[int]) -> None:
        """Forget that parties have submitted numbers."""
        for party in parties:
            self.bits[party] &= ~bits

    def take_complete(self) -> int:
        """Return the numbers that all have submitted who take part in them; nobody has from then on."""
        bits, complete = self.bits, 0
        for group, mask in self._groups.items():
            for party in group:
                mask &= bits[party]
                if not mask:
                    break
            else:
                self.remove(mask, group)
                complete |= mask
        return complete

    def __bool__(self) -> bool:
        return any(self.bits.values())


def indices(bits: int) -> list[int]:
    """Return which bits are set, ascending."""
    return [index for index, digit in enumerate(bin(bits)[:1:-1]) if digit == "1"]
