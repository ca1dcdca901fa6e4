"""How the lower triangle of a (T, T) matrix is cut: panels of rows, and tiles on the diagonal.

Panel p holds `width` rows from p * width on, and its tile the same columns. What lies left of the
tile is a rectangle, all of whose segments pass the corner of the tile: an entry's segment splits
there into a part that depends on its row and a part that depends on its column. T need not be a
multiple of the width: the last panel has the rows that are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

LEAST_WIDTH = 8
"""Narrower panels cost more in loop overhead than they save in tiles."""
BLOCK_ELEMENTS = 1 << 19
"""Matrix elements treated at once: fewer cost more calls, more leave the caches."""
SMALL_BLOCK_ELEMENTS = 1 << 18
"""The same for matrices of one or two panels, which take few calls."""


class Panels(NamedTuple):
    length: int
    """T."""
    width: int
    number: int
    group: int
    """Panels of one matrix that are treated at once, where their products are kept."""
    matrices: int
    """Matrices that are treated at once."""

    def rows(self, p: int) -> slice:
        return slice(p * self.width, min((p + 1) * self.width, self.length))

    def groups(self) -> Iterator[range]:
        """The panels in groups, from the last one upward."""
        for stop in range(self.number, 0, -self.group):
            yield range(max(0, stop - self.group), stop)


@lru_cache(maxsize=64)
def panels_of(t: int) -> Panels:
    """Depends on nothing but T, as must the order of every sum."""
    # The square root balances the calls for panels against those for the rows of a tile.
    most = max(LEAST_WIDTH, min(math.isqrt(t // 2), BLOCK_ELEMENTS // t))
    number = -(-t // most)
    width = -(-t // number)
    number = -(-t // width)
    elements = BLOCK_ELEMENTS if number > 2 else SMALL_BLOCK_ELEMENTS
    group = max(1, min(number, elements // (width * t)))
    return Panels(t, width, number, group, max(1, elements // (t * t)))
