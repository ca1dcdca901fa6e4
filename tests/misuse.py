"""Legal calls of the four operators by argument name, and the proof that a call is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cupyops
from support import array

SENTINEL = 7.0
FUNCTIONS = {
    "modulate": ("x", "scale", "shift", "out"),
    "modulate_backward": (
        *("x", "grad_output", "scale", "shift"),
        *("grad_input", "grad_scale", "grad_shift"),
    ),
    "exp_segsum": ("x", "out"),
    "exp_segsum_backward": ("y", "grad_output", "out"),
}
GRADIENTS = FUNCTIONS["modulate_backward"][-3:]
# the checks come before the early return for empty arrays, so all cases run on each of these
MODULATE_SIZES = [(2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0)]
SEGSUM_SIZES = [(2, 3), (0, 3), (2, 0)]


def size_id(size) -> str:
    return "x".join(map(str, size))


def filled(shape, name: str = "float32", value: float = SENTINEL) -> np.ndarray:
    return array(np.full(shape, value), name)


def valid(function: str, size, name: str = "float32") -> dict:
    """A legal call by argument name; gradients of ``out`` stand under their own names."""
    if function.startswith("modulate"):
        rows = (size[0], size[2])
        call = {"x": filled(size, name, 1), "scale": filled(rows, name, 2)}
        call["shift"] = filled(rows, name, 3)
        if function == "modulate":
            return call | {"out": filled(size, name)}
        call["grad_output"] = filled(size, name, 4)
        return call | dict(zip(GRADIENTS, map(filled, (size, rows, rows), 3 * [name]), strict=True))
    square = (*size, size[-1])
    if function == "exp_segsum":
        return {"x": filled(size, name, -1), "out": filled(square, name)}
    call = {"y": filled(square, name, 1), "grad_output": filled(square, name, 2)}
    return call | {"out": filled(size, name)}


def invoke(function: str, call: dict):
    arguments = dict(call)
    first = arguments.pop(FUNCTIONS[function][0])
    if function == "modulate_backward" and "out" not in arguments:
        arguments["out"] = tuple(arguments.pop(name) for name in GRADIENTS)
    return getattr(cupyops, function)(first, **arguments)


def assert_refused(function, call, error, *words, argument=None) -> str:
    """The call raises ``error``, whose text names function and argument and holds the words."""
    arrays = [a for a in call.values() if isinstance(a, np.ndarray)]
    plain = [a for a in arrays if a.dtype.kind not in "OV" or a.dtype.name == "bfloat16"]
    before = [a.tobytes() for a in plain]
    with pytest.raises(error) as caught:
        invoke(function, call)
    text = str(caught.value)
    assert type(caught.value) is error
    assert text.startswith(f"{function}: "), text
    if argument is not None:
        assert re.search(rf"\b{argument}\b", text), f"{argument} is not named: {text}"
    for word in words:
        assert str(word) in text, f"{word} is missing: {text}"
    assert [a.tobytes() for a in plain] == before, "an array changed before the error"
    return text


def everywhere(arguments=None):
    """Parametrise over function, argument and size (empty sizes too)."""
    cases = [
        pytest.param(function, argument, size, id=f"{function}-{argument}-{size_id(size)}")
        for function, names in FUNCTIONS.items()
        for argument in names
        if arguments is None or argument in arguments
        for size in (MODULATE_SIZES if function.startswith("modulate") else SEGSUM_SIZES)
    ]
    return pytest.mark.parametrize(("function", "argument", "size"), cases)


OUTPUTS = ("out", *GRADIENTS)
