"""float32 <-> 16-bit storage types, faster than NumPy's casts and with the same bits.

NumPy converts float16 one element at a time. Integer and float32 arithmetic on the bit patterns
does the same in a few vectorised passes, for float16 alone: the casts of ``ml_dtypes`` for
bfloat16 are as fast as such passes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 1 << 16
"""Elements converted at once, so that a pass finds what the last one wrote in the L2 cache."""
FEW = 1 << 13
"""Below so many elements the calls of the passes cost more than NumPy's cast."""

_HALF_OVERFLOW = np.float32(65520)
"""The least value that rounds to infinity in float16."""


def widen(src: NDArray[Any], dst: NDArray[Any]) -> None:
    """Copy a 16-bit array into a float32 array of its shape; exact."""
    if src.dtype != np.float16 or src.size < FEW:
        np.copyto(dst, src)
        return
    for source, target in _tiles(src, dst):
        _widen_half(source, target)


def narrow(src: NDArray[Any], dst: NDArray[Any], *, few: int = FEW) -> None:
    """Round a float32 array once, to nearest even, into a 16-bit array of its shape.

    NumPy's cast serves fewer than `few` elements.
    """
    if dst.dtype != np.float16 or src.size < few:
        np.copyto(dst, src, casting="unsafe")
        return
    for source, target in _tiles(src, dst):
        _narrow_half(source, target)


def _tiles(src: NDArray[Any], dst: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    if src.size <= TILE:
        yield src, dst
        return
    # The slowest axis of a block that is not trivial.
    axis = next(axis for axis, length in enumerate(src.shape) if length > 1)
    length = src.shape[axis]
    step = -(-length // -(-src.size // TILE))  # pieces of about one size
    for start in range(0, length, step):
        piece = (slice(None),) * axis + (slice(start, start + step),)
        yield from _tiles(src[piece], dst[piece])


def _widen_half(src: NDArray[Any], dst: NDArray[Any]) -> None:
    bits = dst.view(np.int32)
    np.copyto(bits, src.view(np.int16))  # sign-extended
    np.left_shift(bits, 13, out=bits)
    # The sign and the 15 bits of exponent and mantissa; between them copies of the sign go.
    np.bitwise_and(bits, -0x7000_2000, out=bits)
    # The exponent has the bias 15 instead of 127. A product, so that subnormals come out right.
    np.multiply(dst, np.float32(2.0**112), out=dst)
    # Infinities and NaNs have the greatest exponent, which this takes for a number.
    if dst.max() >= 65536 or dst.min() <= -65536:
        np.copyto(dst, src)


def _narrow_half(src: NDArray[Any], dst: NDArray[Any]) -> None:
    """For |x| in [2^e, 2^(e+1)), or e = -14 if that is greater, float16 counts in 2^(e-10).

    So does float32 for sums of at least 2^(e+13): adding that power rounds |x| as float16 does,
    once, and leaves the count in the last bits. The bits of a float16 are (e+14) * 2^10 + count.
    """
    shape = src.shape
    power, total, half, sign = (buffer[: src.size].reshape(shape) for buffer in _buffers())
    np.abs(src, out=total)
    if not total.max() < _HALF_OVERFLOW:
        np.copyto(dst, src, casting="unsafe")
        return
    bits = src.view(np.int32)
    np.bitwise_and(bits, 0x7F80_0000, out=power)
    np.maximum(power, _LEAST_POWER[: src.size].reshape(shape), out=power)
    np.add(power, 13 << 23, out=power)
    np.add(total, power.view(np.float32), out=total)
    # The sum's own exponent field vanishes modulo 2^16, and (e+13+127) * 2^10 remains to correct.
    np.right_shift(power, 13, out=power)
    np.add(total.view(np.int32), power, out=power)
    np.copyto(half, power, casting="unsafe")
    np.right_shift(bits, 16, out=power)
    np.copyto(sign, power, casting="unsafe")
    np.bitwise_and(sign, 0x8000, out=sign)
    np.add(half, sign, out=half)
    np.add(half, -(126 << 10) & 0xFFFF, out=dst.view(np.uint16))


_LEAST_POWER = np.full(TILE, (127 - 14) << 23, np.int32)
"""2^-14; an array, since NumPy has no vectorised maximum of an array and a scalar."""


class _Local(threading.local):
    buffers: tuple[NDArray[Any], ...] | None = None


_local = _Local()


def _buffers() -> tuple[NDArray[Any], ...]:
    """A tile of each kind that `_narrow_half` needs, kept by each thread: 384 KiB."""
    if _local.buffers is None:
        kinds = (np.int32, np.float32, np.uint16, np.uint16)
        _local.buffers = tuple(np.empty(TILE, kind) for kind in kinds)
    return _local.buffers
