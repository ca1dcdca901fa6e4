"""Argument checks with one style of message: function, argument, got, expected.

Checks look at metadata only, so they run before anything is allocated, and the same ones serve
the eager functions, the plans and every array library.
"""

from __future__ import annotations

from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from array_api_compat import is_array_api_obj, is_numpy_array

from cupyops._arrays import (
    ACCEPTED_TYPES,
    ALSO_ACCEPTED,
    ArraySpec,
    overlaps_itself,
    spec_of,
    type_name,
)

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT32: np.dtype[Any] = np.dtype(np.float32)
FLOAT64: np.dtype[Any] = np.dtype(np.float64)
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.float16), BFLOAT16, FLOAT32, FLOAT64)
"""The storage types, in native byte order."""


def fail(error: type[Exception], function: str, argument: str, got: str, expected: str) -> NoReturn:
    """Raise `error` with the one form of message that this package has."""
    raise error(f"{function}: {argument} {got}; expected {expected}")


def check_flag(function: str, argument: str, value: object) -> bool:
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        got = "is None" if value is None else f"is {a_type(value)}"
        fail(TypeError, function, argument, got, "True or False")
    return bool(value)


def check_array(function: str, argument: str, value: object) -> ArraySpec:
    """The metadata of an array argument."""
    spec = spec_of(value)
    if spec is None:
        got = "is None" if value is None else f"is {a_type(value)}"
        # NumPy's scalars and subclasses count as arrays there.
        foreign = is_array_api_obj(value) and not is_numpy_array(value)
        way_in = f" (numpy.from_dlpack and cupy.from_dlpack make one; {ALSO_ACCEPTED})"
        fail(TypeError, function, argument, got, ACCEPTED_TYPES + (way_in if foreign else ""))
    return spec


def check_same_place(
    function: str, argument: str, spec: ArraySpec, other: str, expected: ArraySpec
) -> None:
    """Refuse a second array library, and a second device, in one call."""
    if spec.library != expected.library:
        wanted = f"one of {expected.library}, as {other}"
        fail(TypeError, function, argument, f"is an array of {spec.library}", wanted)
    if spec.device != expected.device:
        wanted = f"{expected.device}, the device of {other}"
        fail(ValueError, function, argument, f"is on device {spec.device}", wanted)


_BY_NUMBER = {dtype.num: dtype for dtype in DTYPES}


def check_dtype(function: str, argument: str, spec: ArraySpec) -> ArraySpec:
    """The spec with its dtype as in `DTYPES`, so that plans of equal dtypes are one plan.

    A dtype may carry metadata, and a foreign one may not even be hashable.
    """
    dtype = _BY_NUMBER.get(spec.dtype.num)
    if dtype is spec.dtype:
        return spec
    if dtype is None or dtype != spec.dtype:
        accepted = ", ".join(str(dtype) for dtype in DTYPES[:-1])
        expected = f"{accepted} or {DTYPES[-1]} in native byte order"
        fail(TypeError, function, argument, f"has dtype {spec.dtype}", expected)
    return spec._replace(dtype=dtype)


def check_same_dtype(
    function: str, argument: str, spec: ArraySpec, other: str, expected: ArraySpec
) -> None:
    if spec.dtype != expected.dtype:
        fail(
            TypeError,
            function,
            argument,
            f"has dtype {spec.dtype}",
            f"{expected.dtype}, the dtype of {other}",
        )


def check_shape(function: str, argument: str, spec: ArraySpec, expected: ArraySpec) -> None:
    if spec.shape != expected.shape:
        fail(ValueError, function, argument, f"has shape {spec.shape}", f"{expected.shape}")


def check_out(
    function: str, argument: str, given: ArraySpec | None, wanted: ArraySpec | None, source: str
) -> ArraySpec | None:
    """The layout of one output: as given, else as `wanted` (C-contiguous), else absent.

    `source` names the input that decides the dtype, and whether the output exists at all.
    """
    if given is None:
        return wanted
    if wanted is None:
        fail(ValueError, function, argument, f"is given although {source} is None", "None")
    check_same_dtype(function, argument, given, source, wanted)
    check_shape(function, argument, given, wanted)
    if overlaps_itself(given):
        fail(
            ValueError,
            function,
            argument,
            f"overlaps itself (shape {given.shape}, strides {given.strides})",
            "an array whose elements lie apart in memory",
        )
    return wanted if given.has_layout_of(wanted) else given


def compute_dtype(*specs: ArraySpec | None) -> np.dtype[Any]:
    """float64 if any array is float64, else float32."""
    return FLOAT64 if any(s is not None and s.dtype == FLOAT64 for s in specs) else FLOAT32


def a_type(value: object) -> str:
    """The type of a value with its article: `a list`, `an int`."""
    name = type_name(value)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
