"""Launch arguments: checked against the kernel's parameters and packed as the driver packs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .memory import Pointer
from .parse import Entry, Parameter

#: PTX type letter -> kinds of NumPy scalars that may be passed.
KINDS = {"u": "iub", "s": "iub", "b": "iubf", "f": "f"}


class ArgumentError(TypeError):
    """An argument does not fit the kernel's parameter."""


class _MisfitError(Exception):
    """What was given instead; becomes an ArgumentError that names the place."""


def _describe(parameter: Parameter) -> str:
    if parameter.count:
        return f"a struct of {parameter.bytes} bytes"
    return f".{parameter.kind} ({parameter.bytes} bytes)"


def _pack_one(parameter: Parameter, argument: Any) -> bytes:
    """Return the bytes of one argument, or raise _MisfitError."""
    if parameter.count:
        if isinstance(argument, np.void):
            argument = argument.tobytes()
        if not isinstance(argument, (bytes, bytearray)):
            raise _MisfitError(f"got {type(argument).__name__}")
        if len(argument) != parameter.bytes:
            raise _MisfitError(f"got {len(argument)} bytes")
        return bytes(argument)
    if isinstance(argument, Pointer):
        if parameter.kind not in ("u64", "b64", "s64"):
            raise _MisfitError("got a pointer")
        return int(argument).to_bytes(8, "little")
    if not isinstance(argument, np.generic):
        raise _MisfitError(f"got {type(argument).__name__}; pass a NumPy scalar or a Pointer")
    dtype = argument.dtype
    if parameter.is_pointer and dtype != np.uint64:
        raise _MisfitError(f"got {dtype}; it is a pointer")
    if dtype.kind not in KINDS[parameter.kind[0]] or dtype.itemsize != parameter.bytes:
        raise _MisfitError(f"got {dtype} ({dtype.itemsize} bytes)")
    return argument.tobytes()


def pack(entry: Entry, arguments: Sequence[Any]) -> bytes:
    """Check count, width and kind of every argument and lay them out by the PTX alignments."""
    if len(arguments) != len(entry.parameters):
        raise ArgumentError(
            f"{entry.name}: {len(arguments)} arguments given, {len(entry.parameters)} expected"
        )
    last = entry.parameters[-1] if entry.parameters else None
    block = bytearray(last.offset + last.bytes if last else 0)
    for index, (parameter, argument) in enumerate(zip(entry.parameters, arguments, strict=True)):
        try:
            data = _pack_one(parameter, argument)
        except _MisfitError as error:
            raise ArgumentError(
                f"{entry.name}: argument {index} is {_describe(parameter)}; {error}"
            ) from None
        block[parameter.offset : parameter.offset + parameter.bytes] = data
    return bytes(block)
