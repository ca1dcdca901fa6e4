"""Which library an array belongs to, what it looks like, and where it lies in memory.

The only room that looks at an array's type. A library is one row of `_LIBRARIES`; no library but
NumPy is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from operator import index
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""An array of a supported library; no common base class exists."""
Arrays: TypeAlias = tuple[Any, ...]
"""The arrays of one call in the order of the operator's names; None for one that is absent."""


MAX_BYTES = 2**63 - 1
"""No address space holds more, and offsets are 64-bit integers."""


class _Fields(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    library: str
    device: str


class ArraySpec(_Fields):
    """Describes an array without one, to plan ahead: its metadata, never its memory.

    Parameters
    ----------
    shape : tuple of int
        As the array would have it; any number of axes.
    dtype : dtype
        As NumPy understands it; ``ml_dtypes.bfloat16`` too. Any dtype can be described; operators
        take float16, bfloat16, float32 and float64.
    library : {"numpy", "cupy"}
        The array library; the arrays of a later run must be of the same one.
    device : str or int, optional
        For CuPy the number of the GPU, or ``"cuda:<number>"``; the current one by default.
    strides : tuple of int, optional
        In bytes, one for each axis; C-contiguous by default. A stride has no meaning on an axis
        of length 0 or 1.

    Raises
    ------
    TypeError
        Shape, strides or dtype are not what such values can be.
    ValueError
        A length is negative, there is not one stride for each axis, library or device is
        unknown, or the array would have more than 2**63 - 1 bytes.
    ImportError
        The current CuPy device is asked for and CuPy cannot be imported.
    RuntimeError
        The current CuPy device is asked for and no GPU or driver answers.

    Examples
    --------
    >>> import cupyops
    >>> x = cupyops.ArraySpec((2, 256, 1152), "float32")
    >>> cupyops.plan_modulate_backward(x, grad_output=x).workspace_size
    0
    """

    __slots__ = ()
    __module__ = "cupyops"

    def __new__(
        cls,
        shape: Iterable[SupportsIndex],
        dtype: Any,
        *,
        library: str = "numpy",
        device: str | int | None = None,
        strides: Iterable[SupportsIndex] | None = None,
    ) -> ArraySpec:
        lengths = _integers("shape", shape)
        if any(length < 0 for length in lengths):
            raise ValueError(f"ArraySpec: shape is {lengths}; expected no length below 0")
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise TypeError(f"ArraySpec: dtype is {dtype!r}; expected a dtype of NumPy") from error
        steps = _c_strides(lengths, kind.itemsize)
        if strides is not None:
            steps = _integers("strides", strides)
            if len(steps) != len(lengths):
                raise ValueError(f"ArraySpec: strides is {steps}; expected one for each axis")
        if library not in _LIBRARIES:
            accepted = " or ".join(repr(name) for name in _LIBRARIES)
            raise ValueError(f"ArraySpec: library is {library!r}; expected {accepted}")
        place = _LIBRARIES[library].device(device)
        spec = cls._make((lengths, kind, steps, library, place))
        extent = extent_of(spec)
        if extent is not None and max(spec.nbytes, extent.high - extent.low) > MAX_BYTES:
            got = f"shape is {lengths} and strides {steps}"
            raise ValueError(f"ArraySpec: {got}; expected at most 2**63 - 1 bytes")
        return spec

    def __getnewargs_ex__(self) -> tuple[Any, ...]:
        """For copy and pickle, which would pass all fields by position."""
        by_name = {"library": self.library, "device": self.device, "strides": self.strides}
        return (self.shape, self.dtype), by_name

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; a broadcast axis counts in full."""
        return self.size * self.dtype.itemsize

    def has_layout_of(self, other: ArraySpec) -> bool:
        """Whether both shapes agree and every element lies at the same offset from the first."""
        if self.shape != other.shape:
            return False
        return self.size == 0 or all(
            mine == theirs
            for length, mine, theirs in zip(self.shape, self.strides, other.strides, strict=True)
            if length > 1
        )

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _integers(argument: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        got = f"{argument} is {values!r}"
        raise TypeError(f"ArraySpec: {got}; expected a tuple of integers") from error


def contiguous(shape: tuple[int, ...], like: ArraySpec, dtype: np.dtype[Any]) -> ArraySpec:
    """A C-contiguous array of `shape` and `dtype` in the library and on the device of `like`."""
    strides = _c_strides(shape, dtype.itemsize)
    return ArraySpec._make((shape, dtype, strides, like.library, like.device))


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [0] * len(shape)
    step = itemsize
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def is_contiguous(spec: ArraySpec) -> bool:
    return spec.has_layout_of(contiguous(spec.shape, spec, spec.dtype))


EXTRAS = "install cupyops with its extra 'cuda13' ('cuda12' for a driver of CUDA 12)"


def import_cupy() -> Any:
    """CuPy; a plan from `ArraySpec` may be the first to ask for it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"cupyops: CuPy could not be imported: {error}; {EXTRAS}") from error
    return cupy


def require_device(number: int | None) -> int:
    """The number of a GPU, the current one for None. Says what is missing, before CuPy fails."""
    runtime = import_cupy().cuda.runtime
    try:
        count, current = runtime.getDeviceCount(), runtime.getDevice()
    except runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"cupyops: no CUDA driver or GPU answers: {error}; a GPU of compute capability 7.5 or "
            "newer and its driver are needed for CuPy arrays, NumPy arrays need neither"
        ) from error
    number = current if number is None else number
    if number >= count:
        found = f"{count} GPU(s) were found"
        raise RuntimeError(f"cupyops: there is no device {CUDA_DEVICE}{number}; {found}")
    return int(number)


class _Library(NamedTuple):
    types: frozenset[tuple[str, str]]
    """(module, qualified name) of the accepted classes, so that nothing has to be imported."""
    spec: Callable[[Array], ArraySpec]
    empty: Callable[[ArraySpec], Array]
    address: Callable[[Array], int]
    writable: Callable[[Array], bool]
    aligned: bool
    """Whether elements must lie at multiples of their size, as kernels need."""
    device: Callable[[str | int | None], str]
    """The name of a device that the user names."""


_new_tuple = tuple.__new__


def _numpy_spec(array: Array) -> ArraySpec:
    # What `_make` does, without its call: a small operation feels it.
    return _new_tuple(ArraySpec, (array.shape, array.dtype, array.strides, "numpy", "cpu"))


_MAPPED_BYTES = 32 << 20
"""Above so many bytes, the GNU C library takes memory from the system for each array, and returns
it with the array: every page is new, and small ones are many."""
_HUGE_PAGE = 2 << 20
"""Bytes of the pages that NumPy asks for where memory is large. Only whole ones can be had."""


def _numpy_empty(spec: ArraySpec) -> Array:
    if spec.nbytes <= _MAPPED_BYTES:
        return np.empty(spec.shape, spec.dtype)
    # Both ends would be small pages. What is skipped is never touched, so it takes no memory.
    try:
        memory = np.empty(spec.nbytes + _HUGE_PAGE, np.uint8)
    except (MemoryError, ValueError):  # the array itself may fit, else it has the better message
        return np.empty(spec.shape, spec.dtype)
    start = -memory.ctypes.data % _HUGE_PAGE
    return np.ndarray(spec.shape, spec.dtype, buffer=memory, offset=start)


def _numpy_address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _numpy_writable(array: Array) -> bool:
    writable: bool = array.flags.writeable
    return writable


def _numpy_device(device: str | int | None) -> str:
    if device not in (None, "cpu"):
        raise ValueError(f"ArraySpec: device is {device!r}; expected None or 'cpu' for numpy")
    return "cpu"


def _cupy_spec(array: Array) -> ArraySpec:
    device = _cuda_device(array.device.id)
    return _new_tuple(ArraySpec, (array.shape, array.dtype, array.strides, "cupy", device))


@cache
def _cuda_device(number: int) -> str:
    return f"{CUDA_DEVICE}{number}"


def _cupy_device(device: str | int | None) -> str:
    if device is None:
        device = require_device(None)
    number = device.removeprefix(CUDA_DEVICE) if isinstance(device, str) else str(index(device))
    if not number.isdecimal():
        expected = f"the number of a GPU or '{CUDA_DEVICE}<number>'"
        raise ValueError(f"ArraySpec: device is {device!r}; expected {expected}")
    return _cuda_device(int(number))


def _cupy_empty(spec: ArraySpec) -> Array:
    import cupy  # the caller has handed us CuPy arrays, so it is there

    return cupy.empty(spec.shape, spec.dtype)  # on the current device, in the current stream's pool


def _cupy_address(array: Array) -> int:
    address: int = array.data.ptr
    return address


def _cupy_writable(_array: Array) -> bool:
    return True  # CuPy has no read-only arrays


CUDA_DEVICE = "cuda:"
"""What the name of a GPU starts with; its number follows."""

_LIBRARIES = {
    "numpy": _Library(
        # Other subclasses (matrix, masked arrays) change what an operator means.
        types=frozenset({("numpy", "ndarray"), ("numpy", "memmap")}),
        spec=_numpy_spec,
        empty=_numpy_empty,
        address=_numpy_address,
        writable=_numpy_writable,
        aligned=False,
        device=_numpy_device,
    ),
    "cupy": _Library(
        types=frozenset({("cupy", "ndarray")}),
        spec=_cupy_spec,
        empty=_cupy_empty,
        address=_cupy_address,
        writable=_cupy_writable,
        aligned=True,
        device=_cupy_device,
    ),
}
ACCEPTED_TYPES = "a numpy.ndarray or cupy.ndarray"
ALSO_ACCEPTED = "the functions, but no plans, take a torch.Tensor or a dask.array.Array too"
"""Of the layers below, for messages."""

LAYERS = {
    ("torch", "Tensor"): "cupyops.torch",
    ("dask.array.core", "Array"): "cupyops._dask",
}
"""Classes of arrays that hold those above, and the module with the functions for them. It is
imported when such an array is first seen: whoever has one has imported its library."""


def layer_of(arrays: Iterable[object]) -> str | None:
    """The module that takes these arrays, or None where the arrays are taken as they are."""
    for array in arrays:
        cls = type(array)
        if array is None or cls in _library_of:
            continue
        # Subclasses too: layers call their library, which knows what becomes of them.
        for base in cls.__mro__:
            module = LAYERS.get((base.__module__, base.__qualname__))
            if module is not None:
                return module
    return None


# Class -> library, filled on first sight; classes of foreign arrays never get in.
_library_of: dict[type, _Library] = {}


def spec_of(value: object) -> ArraySpec | None:
    """The metadata of an array, or None for what is not an array of a supported library.

    Not of an `ArraySpec`: only a plan can do without the array.
    """
    library = _library_of.get(type(value)) or _recognise(type(value))
    return None if library is None else library.spec(value)


def _recognise(cls: type) -> _Library | None:
    """The library of a class seen for the first time: by its name, and it must bear it rightly."""
    name = (cls.__module__, cls.__qualname__)
    for library in _LIBRARIES.values():
        if name in library.types and getattr(sys.modules.get(name[0]), name[1], None) is cls:
            _library_of[cls] = library
            return library
    return None


def type_name(value: object) -> str:
    """The name a reader knows: `list`, `numpy.matrix`, `torch.Tensor`."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def empty(spec: ArraySpec) -> Array:
    """A new C-contiguous array with undefined contents."""
    return _LIBRARIES[spec.library].empty(spec)


def is_writable(array: Array) -> bool:
    return _library_of[type(array)].writable(array)


def address_of(array: Array) -> int:
    """The address of the element whose indices are all 0."""
    return _library_of[type(array)].address(array)


def addresses_of(names: Iterable[str], arrays: Arrays, like: ArraySpec) -> dict[str, int]:
    """The addresses by name, of arrays of the library of `like`; absent ones are left out."""
    address = _LIBRARIES[like.library].address
    pairs = zip(names, arrays, strict=True)
    return {name: address(array) for name, array in pairs if array is not None}


def needs_alignment(spec: ArraySpec) -> bool:
    """Whether elements of such an array must lie at multiples of their size."""
    return _LIBRARIES[spec.library].aligned


def has_aligned_strides(spec: ArraySpec) -> bool:
    """Whether all elements are aligned if the first is."""
    return spec.size == 0 or all(
        step % spec.dtype.itemsize == 0
        for length, step in zip(spec.shape, spec.strides, strict=True)
        if length > 1
    )


class Extent(NamedTuple):
    """The bytes that an array covers, relative to the address of its first element."""

    low: int
    """Below 0 where a stride is negative."""
    high: int
    axes: tuple[tuple[int, int], ...]
    """(length, stride in bytes); lengths above 1, strides above 0."""
    itemsize: int

    def width_within(self, period: int) -> int:
        """Bytes spanned when steps that are multiples of `period` are left out."""
        return self.itemsize + sum((n - 1) * step for n, step in self.axes if step % period)


def extent_of(spec: ArraySpec) -> Extent | None:
    """What an array of this layout covers; None if it has no elements."""
    if spec.size == 0:
        return None
    low, high = 0, spec.dtype.itemsize
    axes = []
    for length, step in zip(spec.shape, spec.strides, strict=True):
        if length > 1 and step:
            axes.append((length, abs(step)))
            low += (length - 1) * min(step, 0)
            high += (length - 1) * max(step, 0)
    return Extent(low, high, tuple(axes), spec.dtype.itemsize)


def overlap(a: Extent | None, a_address: int, b: Extent | None, b_address: int) -> bool:
    """Whether two arrays may share a byte.

    Judged on the host from addresses alone. Exact for arrays apart in memory and for those that
    occupy different columns (or rows) of one common stride, as `chunk(6)` views do; other
    interleaved patterns count as overlapping.
    """
    if a is None or b is None:
        return False
    a_start, b_start = a_address + a.low, b_address + b.low
    if a_address + a.high <= b_start or b_address + b.high <= a_start:
        return False
    for period in {step for _, step in a.axes + b.axes}:
        # Modulo the period, each array is one run of bytes; are the two runs apart?
        offset = (b_start - a_start) % period
        if a.width_within(period) <= offset and offset + b.width_within(period) <= period:
            return False
    return True


def overlaps_itself(spec: ArraySpec) -> bool:
    """Whether two elements may share a byte, as on a broadcast axis (stride 0)."""
    if spec.size == 0:
        return False
    covered = spec.dtype.itemsize
    axes = [(abs(step), n) for n, step in zip(spec.shape, spec.strides, strict=True) if n > 1]
    for step, length in sorted(axes):
        if step < covered:
            return True
        covered += (length - 1) * step
    return False
