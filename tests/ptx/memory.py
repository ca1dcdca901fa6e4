"""NumPy arrays that stand for device memory, and what is known of each of their bytes.

Addresses that a kernel sees are the arrays' own, unless an array is registered at a made-up place
(``register_sparse``). Every byte has a state: live, writable, poison, written; the runtime reads
and updates it in checked launches. Registrations may overlap (columns of one base array, an output
that is an input): the last one names the buffer, and a byte is writable if any of them says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

SECTOR = 32
DEVICE_ALIGNMENT = 512  # what CuPy's allocator gives
MAX_BUFFERS = 1 << 14

# Mirrored in runtime/machine.h.
LIVE, WRITABLE, POISON, SLACK, WRITTEN = 1, 2, 4, 8, 16

Array = np.ndarray[Any, np.dtype[Any]]


class Pointer(int):
    """A device address, as a launch argument."""


class NeverWrittenError(AssertionError):
    """Elements of an output were not written by any launch."""


@dataclass
class Segment:
    """A run of addresses [low, high) in whole sectors, and the state and owner of each byte."""

    low: int
    high: int
    host: int
    granule: int
    state: Array
    owner: Array

    @property
    def shift(self) -> int:
        """Host address minus virtual address."""
        return self.host - self.low


@dataclass
class Buffer:
    """One registration: the array and where its pieces lie.

    A piece is (elements of the array, virtual address of the first); an ordinary array is one
    piece, a sparse one has a piece for each contiguous run.
    """

    name: str
    index: int
    array: Array
    readonly: bool
    pieces: list[tuple[Array, int]] = field(default_factory=list)


def empty(shape: Sequence[int] | int, dtype: Any, *, offset: int = 0) -> Array:
    """Allocate as a device does: aligned to 512 bytes, then shifted by *offset* bytes."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + DEVICE_ALIGNMENT + offset, np.uint8)
    start = -raw.ctypes.data % DEVICE_ALIGNMENT + offset
    made: Array = raw[start : start + size].view(dtype).reshape(shape)
    return made


def copy(array: Array, *, offset: int = 0) -> Array:
    """Copy to device-aligned memory, C-contiguous."""
    made = empty(array.shape, array.dtype, offset=offset)
    made[...] = array
    return made


def pointer(array: Array) -> Pointer:
    """Return an array's address without registering it; enough for plain launches."""
    return Pointer(array.ctypes.data)


class Memory:
    """All registered memory of one test."""

    def __init__(self) -> None:
        self.unchecked = False  # a plain launch has written without a record
        self.buffers: list[Buffer] = []
        self.segments: list[Segment] = []
        self.freed: list[tuple[int, int, str]] = []

    def __getitem__(self, name: str) -> Buffer:
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(f"no buffer {name!r}; registered: {[b.name for b in self.buffers]}")

    # ---- registering ----------------------------------------------------------------------------

    def register(
        self,
        array: Array,
        name: str,
        *,
        readonly: bool = False,
        poison: bool | Array = False,
        sector_slack: bool = False,
        whole_base: bool = False,
    ) -> Pointer:
        """Register the elements of an array, of any strides, and return its address.

        Parameters
        ----------
        array : ndarray
            Kept alive until released. Bytes between its elements are out of bounds.
        name : str
            Names the buffer in reports and errors.
        readonly : bool
            A store is an error.
        poison : bool or boolean ndarray of the array's shape
            Elements whose use is an error until they are written (outputs, workspace, and the
            parts of an input that must not influence anything).
        sector_slack : bool
            Loads may also touch bytes of a 32-byte sector that holds an element; what they get
            is poison.
        whole_base : bool
            Everything of the array's base is live, not only the elements of the view.
        """
        buffer = self._new(name, array, readonly)
        address = array.ctypes.data
        if array.size == 0:
            return Pointer(address)
        buffer.pieces.append((array, address))
        span = array
        while whole_base and isinstance(span.base, np.ndarray):
            span = span.base
        self._cover(*byte_bounds(span), byte_bounds(span)[0], _granule(array))
        if span is not array:
            self._mark(span, span.ctypes.data, buffer, sector_slack)
        self._mark(array, address, buffer, sector_slack)
        self._poison(buffer, poison)
        return Pointer(address)

    def register_sparse(
        self,
        array: Array,
        name: str,
        *,
        base: int,
        strides: Sequence[int],
        readonly: bool = False,
        poison: bool | Array = False,
        sector_slack: bool = False,
    ) -> Pointer:
        """Register an array whose element [i, j, ...] the kernel sees at base + i*s0 + j*s1 + ...

        The strides are in bytes and may be of any size, so offsets beyond 2**32 need no memory.
        Checked launches only. The array must be C-contiguous; runs that are also contiguous
        under *strides* become one segment.
        """
        if not array.flags.c_contiguous or len(strides) != array.ndim:
            raise ValueError("register_sparse: a C-contiguous array and one stride per axis")
        buffer = self._new(name, array, readonly)
        inner, run = array.ndim, array.itemsize
        while inner and strides[inner - 1] == run:
            inner -= 1
            run *= array.shape[inner]
        for index in itertools.product(*map(range, array.shape[:inner])):
            piece = array[index] if inner else array
            if piece.size == 0:
                continue
            address = base + sum(i * s for i, s in zip(index, strides, strict=False))
            piece = np.atleast_1d(piece)
            buffer.pieces.append((piece, address))
            self._cover(address, address + run, byte_bounds(piece)[0], _granule(piece, address))
            self._mark(piece, address, buffer, sector_slack)
        self._poison(buffer, poison)
        return Pointer(base)

    def release(self, name: str) -> None:
        """End a registration: its bytes are out of bounds from now on."""
        buffer = self[name]
        for _, state, owner, low in self._views(buffer):
            own = owner == buffer.index
            state[own] &= np.uint8(SLACK)
            self.freed.append((low, low + state.size, name))
        buffer.name = f"{name} (released)"
        buffer.pieces = []

    def _new(self, name: str, array: Array, readonly: bool) -> Buffer:
        if any(buffer.name == name for buffer in self.buffers):
            raise ValueError(f"a buffer named {name!r} is already registered")
        if len(self.buffers) == MAX_BUFFERS:
            raise ValueError("too many buffers")
        self.buffers.append(Buffer(name, len(self.buffers), array, readonly))
        return self.buffers[-1]

    def _cover(self, low: int, high: int, host: int, granule: int) -> None:
        """Make one segment span [low, high), in whole sectors, merging those it touches."""
        shift = host - low
        low, high = low // SECTOR * SECTOR, -(-high // SECTOR) * SECTOR
        touched = [s for s in self.segments if s.low < high and low < s.high]
        if any(s.shift != shift for s in touched):
            raise ValueError("registered addresses overlap but lie on different memory")
        if len(touched) == 1 and touched[0].low <= low and high <= touched[0].high:
            touched[0].granule = math.gcd(touched[0].granule, granule)
            return
        whole_low = min([low, *(s.low for s in touched)])
        whole_high = max([high, *(s.high for s in touched)])
        size = whole_high - whole_low
        merged = Segment(
            whole_low,
            whole_high,
            whole_low + shift,
            math.gcd(granule, *(s.granule for s in touched)),
            np.zeros(size, np.uint8),
            np.zeros(size, np.uint16),
        )
        for old in touched:
            place = slice(old.low - whole_low, old.high - whole_low)
            merged.state[place], merged.owner[place] = old.state, old.owner
            self.segments.remove(old)
        self.segments.append(merged)
        self.segments.sort(key=lambda s: s.low)

    def _segment(self, address: int) -> Segment:
        for segment in self.segments:
            if segment.low <= address < segment.high:
                return segment
        raise KeyError(f"address {address:#x} is not registered")

    def _mark(self, piece: Array, address: int, buffer: Buffer, slack: bool) -> None:
        segment = self._segment(address)
        state = _bytes_of(piece, segment.state, address - segment.low)
        state |= np.uint8(LIVE if buffer.readonly else LIVE | WRITABLE)
        _bytes_of(piece, segment.owner, address - segment.low)[...] = buffer.index
        if slack:
            sectors = segment.state.reshape(-1, SECTOR)
            touched = np.bitwise_or.reduce(sectors & LIVE, axis=1) != 0
            sectors[touched] |= np.uint8(SLACK)
            # Traffic in the slack is the neighbour's.
            owners = segment.owner.reshape(-1, SECTOR)
            idle = (sectors & LIVE == 0) & touched[:, None]
            owners[idle] = buffer.index

    def _views(self, buffer: Buffer) -> Iterator[tuple[Array, Array, Array, int]]:
        """Yield (elements, their states, their owners, address) of each piece, per byte."""
        for piece, address in buffer.pieces:
            segment = self._segment(address)
            offset = address - segment.low
            state = _bytes_of(piece, segment.state, offset)
            yield piece, state, _bytes_of(piece, segment.owner, offset), address

    # ---- poison and writes -----------------------------------------------------------------------

    def _poison(self, buffer: Buffer, where: bool | Array) -> None:
        if where is False:
            return
        mask = np.broadcast_to(np.asarray(where, bool), buffer.array.shape)
        parts: Iterable[Array] = [mask] if len(buffer.pieces) == 1 else _like_pieces(buffer, mask)
        for (_, state, _, _), part in zip(self._views(buffer), parts, strict=True):
            chosen: Array = np.reshape(part, state.shape[:-1])
            state[chosen] |= np.uint8(POISON)

    def poison(self, name: str, where: bool | Array = True) -> None:
        """Mark elements (all, or those of a boolean mask) as poison again."""
        self._poison(self[name], where)

    def forget(self) -> None:
        """Forget all poison: a plain launch has written, nobody knows where."""
        self.unchecked = True
        for segment in self.segments:
            segment.state &= np.uint8(0xFF ^ POISON)

    def written(self, name: str) -> Array:
        """Return a boolean array: which elements were written by checked launches."""
        buffer = self[name]
        parts = [((state & WRITTEN) != 0).all(axis=-1) for _, state, _, _ in self._views(buffer)]
        if not parts:
            return np.zeros(buffer.array.shape, bool)
        return np.concatenate([part.reshape(-1) for part in parts]).reshape(buffer.array.shape)

    def check_written(self, *names: str) -> None:
        """Raise NeverWrittenError if an element of these buffers was never written."""
        if self.unchecked:
            raise RuntimeError(
                "check_written needs checked launches only: plain ones keep no record"
            )
        for name in names:
            missing = np.argwhere(~self.written(name))
            if len(missing):
                first = tuple(int(i) for i in missing[0])
                raise NeverWrittenError(
                    f"{name}: {len(missing)} of {self[name].array.size} elements never written, "
                    f"the first at {first}"
                )

    def describe(self, address: int) -> str:
        """Say where an address lies, for error messages."""
        near: list[tuple[int, str]] = []
        for buffer in reversed(self.buffers):
            for piece, start in buffer.pieces:
                low, high = (end - piece.ctypes.data + start for end in byte_bounds(piece))
                if low <= address < high:
                    return f"{address - start} bytes from the start of {buffer.name!r}"
                if address < low:
                    near.append((low - address, f"{low - address} bytes before {buffer.name!r}"))
                else:
                    past = address - high
                    near.append((past, f"{past} bytes past the end of {buffer.name!r}"))
        for low, high, name in reversed(self.freed):
            if low <= address < high:
                return f"in released buffer {name!r}"
        return min(near)[1] if near else "near no registered buffer"


def _granule(array: Array, address: int | None = None) -> int:
    """Bytes per race record: an element, or less where elements do not start on its multiples."""
    address = array.ctypes.data if address is None else address
    return math.gcd(array.itemsize, address % SECTOR, *array.strides)


def _bytes_of(array: Array, table: Array, offset: int) -> Array:
    """View a per-byte table as the bytes of each element of an array that starts at *offset*."""
    if array.flags.c_contiguous:
        return table[offset : offset + array.nbytes].reshape(*array.shape, array.itemsize)
    unit = table.itemsize
    strides = (*(stride * unit for stride in array.strides), unit)
    return as_strided(table[offset:], (*array.shape, array.itemsize), strides)


def _like_pieces(buffer: Buffer, mask: Array) -> Iterator[Array]:
    """Cut a mask into the pieces of a sparse buffer."""
    flat, start = mask.reshape(-1), 0
    for piece, _ in buffer.pieces:
        yield flat[start : start + piece.size]
        start += piece.size
