"""Kernel launches as data: what to launch, with which grid, on which arguments.

Nothing here is an object of a GPU library. A launch names its arrays; whoever executes it (CuPy,
or the CPU executor of the tests) supplies addresses, and gets typed scalars in return.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cupyops._arrays import ArraySpec

MAX_GRID = 2**31 - 1
"""Blocks along the first grid axis; kernels loop, so that any number of tiles fits."""
MAX_BLOCK_Z = 64
THREADS = 256
"""Threads of a block, which the kernels' launch bounds name too."""
WARP = 32
VECTOR_BYTES = 16
"""Bytes that one thread moves at once, and the alignment that needs."""


class Kernel(NamedTuple):
    source: str
    """File name in ``kernels_cu``."""
    name: str
    """C++ name expression, such as ``modulate<f32, f32, true>``."""


class Pointer(NamedTuple):
    """The address of a named array of the call, moved by a number of bytes."""

    array: str
    offset: int = 0


class Workspace(NamedTuple):
    """An address inside the workspace, from its first byte that is VECTOR_BYTES-aligned."""

    offset: int


NULL = np.uint64(0)
"""The address of an array that is absent."""

Argument: TypeAlias = "Pointer | Workspace | np.generic"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. The vector form carries the scalar form for addresses it cannot take."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    """Of dynamic shared memory."""
    args: tuple[Argument, ...]
    aligned: tuple[tuple[str, int], ...] = ()
    """Arrays whose addresses must be multiples of so many bytes."""
    scalar: Launch | None = None
    _pointers: tuple[tuple[int, str, int], ...] = field(init=False, repr=False)
    """Positions in `args` that wait for the address of an array, its name, and the offset."""
    _workspaces: tuple[tuple[int, int], ...] = field(init=False, repr=False)
    """Those that wait for the workspace, and the offset."""

    def __post_init__(self) -> None:
        places = tuple(enumerate(self.args))
        pointers = tuple((i, *a) for i, a in places if isinstance(a, Pointer))
        workspaces = tuple((i, *a) for i, a in places if isinstance(a, Workspace))
        object.__setattr__(self, "_pointers", pointers)
        object.__setattr__(self, "_workspaces", workspaces)

    def for_addresses(self, addresses: Mapping[str, int]) -> Launch:
        """This launch if all addresses are aligned as it needs, else its scalar form."""
        if self.scalar is not None:
            for name, alignment in self.aligned:
                if addresses[name] % alignment:
                    return self.scalar
        return self

    def bind(self, addresses: Mapping[str, int], workspace: int) -> tuple[np.generic, ...]:
        """The arguments as typed scalars: a driver takes their bytes as they are."""
        bound: list[Any] = list(self.args)
        uint64 = np.uint64
        for i, array, offset in self._pointers:
            bound[i] = uint64(addresses[array] + offset)
        if self._workspaces:
            start = workspace + -workspace % VECTOR_BYTES
            for i, offset in self._workspaces:
                bound[i] = uint64(start + offset)
        return tuple(bound)

    def with_vector_form(self, kernel: Kernel, aligned: Iterable[tuple[str, int]]) -> Launch:
        """The same launch of `kernel`, with this one for addresses that are not so aligned."""
        return replace(self, kernel=kernel, aligned=tuple(aligned), scalar=self)

    def __str__(self) -> str:
        grid, block = ("x".join(str(n) for n in axes) for axes in (self.grid, self.block))
        return f"{self.kernel.name} grid {grid} block {block} shared {self.shared_bytes}"


class WorkspacePlan:
    """Hands out pieces of the workspace and counts its bytes."""

    def __init__(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> Workspace:
        piece = Workspace(self._used)
        self._used += nbytes + -nbytes % VECTOR_BYTES
        return piece

    @property
    def size(self) -> int:
        """Bytes the caller must bring, whatever the alignment of the first."""
        return self._used + VECTOR_BYTES - 1 if self._used else 0


C_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


def c_type(dtype: np.dtype[Any]) -> str:
    """The name of a storage type in ``common.cuh``."""
    return C_TYPES[dtype.name]


def instance(template: str, *arguments: str | bool) -> str:
    """A C++ name expression: ``instance("f", "f32", True)`` is ``f<f32, true>``."""
    texts = (str(a).lower() if isinstance(a, bool) else a for a in arguments)
    return f"{template}<{', '.join(texts)}>"


def int64s(values: Iterable[int]) -> tuple[np.int64, ...]:
    return tuple(np.int64(value) for value in values)


def element_strides(spec: ArraySpec) -> tuple[int, ...]:
    """Strides in elements; 0 on axes without steps, where a stride means nothing."""
    return tuple(
        step // spec.dtype.itemsize if length > 1 else 0
        for length, step in zip(spec.shape, spec.strides, strict=True)
    )


def grid(tiles: int) -> tuple[int, int, int]:
    return (min(tiles, MAX_GRID), 1, 1)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()
