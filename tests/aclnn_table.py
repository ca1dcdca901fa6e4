"""What the C API accepts and refuses, written down by hand: nothing here is asked of the package.

A shape is a word, one letter for each axis: B, L, D or N, H, T; the small letter is one more.
"""

from __future__ import annotations

import itertools

import numpy as np

from support import array

SUCCESS, NULLPTR, INVALID, RUNTIME, INNER = 0, 161001, 161002, 361001, 561000
DTYPES = ("float32", "float16", "bfloat16")

# function -> argument -> shape, in the order of C; outputs last
CALLS = {
    "aclnnModulate": {"self": "BLD", "scaleOptional": "BD", "shiftOptional": "BD", "out": "BLD"},
    "aclnnModulateBackward": {
        **{"grad_output": "BLD", "input": "BLD", "scale": "BD", "shift": "BD"},
        **{"grad_input": "BLD", "grad_scale": "BD", "grad_shift": "BD"},
    },
    "aclnnExpSegsum": {"self": "NHT", "out": "NHTT"},
    "aclnnExpSegsumBackward": {"gradOutput": "NHTT", "gradSelf": "NHTT", "gradInput": "NHT"},
}
FUNCTIONS = tuple(CALLS)
OUTPUTS = ("out", "grad_input", "grad_scale", "grad_shift", "gradInput")
ARGUMENTS = [(function, argument) for function in CALLS for argument in CALLS[function]]
REQUIRED = {
    "aclnnModulate": ("self", "out"),
    "aclnnModulateBackward": ("grad_output", "input", "grad_input"),
    "aclnnExpSegsum": ("self", "out"),
    "aclnnExpSegsumBackward": ("gradOutput", "gradSelf", "gradInput"),
}

FULL = {"B": 2, "L": 3, "D": 4, "N": 2, "H": 3, "T": 5}
SIZES = [FULL, *(FULL | {axis: 0} for axis in FULL)]


def shape_of(word: str, sizes: dict[str, int]) -> tuple[int, ...]:
    letters = sizes | {axis.lower(): size + 1 for axis, size in sizes.items()} | {"1": 1}
    return tuple(letters[letter] for letter in word)


def tensors(
    function: str,
    changes: dict[str, str | None] | None = None,
    sizes: dict[str, int] = FULL,
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, np.ndarray | None]:
    """The tensors of a call: random inputs, outputs that hold a sentinel."""
    rng = np.random.default_rng(seed)
    words = CALLS[function] | (changes or {})
    return {
        name: None
        if word is None
        else array(np.full(shape_of(word, sizes), 77.0), dtype)
        if name in OUTPUTS
        else array(rng.uniform(-2, 2, shape_of(word, sizes)), dtype)
        for name, word in words.items()
    }


def _accepted() -> list[tuple[str, dict[str, str | None], dict[str, int]]]:
    rows: list[tuple[str, dict[str, str | None], dict[str, int]]] = []
    modulation = [FULL | {axis: size} for axis in "BLD" for size in (0, 1, FULL[axis])]
    for scale, shift in itertools.product(("BD", "B1D"), repeat=2):
        forms = {"scaleOptional": scale, "shiftOptional": shift}
        rows += [("aclnnModulate", forms, sizes) for sizes in modulation]
    without_scale = {"scale": None, "grad_scale": None}
    without_shift = {"shift": None, "grad_shift": None}
    for absent in ({}, without_scale, without_shift, without_scale | without_shift):
        for sizes in modulation:
            # where L is 0, parameters have to be empty or absent
            if sizes["L"] or len(absent) == 4 or not sizes["B"] * sizes["D"]:
                rows.append(("aclnnModulateBackward", absent, sizes))
    segments = [FULL | {axis: size} for axis in "NHT" for size in (0, 1, FULL[axis])]
    for sizes in segments:
        rows += [("aclnnExpSegsum", {}, sizes)]
        rows += [("aclnnExpSegsum", {"self": "NNHT", "out": "NNHTT"}, sizes)]
        rows += [("aclnnExpSegsumBackward", {}, sizes)]
        five = {"gradOutput": "NNHTT", "gradSelf": "NNHTT", "gradInput": "NNHT"}
        rows += [("aclnnExpSegsumBackward", five, sizes)]
    return rows


ACCEPTED = _accepted()

# function -> (what is changed, status, the argument that the message names)
REFUSED: dict[str, list[tuple[dict[str, str | None], int, str]]] = {
    "aclnnModulate": [
        ({"self": None}, NULLPTR, "self"),
        ({"out": None}, NULLPTR, "out"),
        ({"self": None, "scaleOptional": None, "out": "BL"}, NULLPTR, "self"),
        ({"out": None, "shiftOptional": "DB"}, NULLPTR, "out"),
        ({"scaleOptional": None}, INVALID, "scaleOptional"),
        ({"shiftOptional": None}, INVALID, "shiftOptional"),
        ({"scaleOptional": None, "shiftOptional": None}, INVALID, "scaleOptional"),
        *(({"self": word}, INVALID, "self") for word in ("", "D", "BD", "BLDD", "1BLD")),
        *(({"self": word}, INVALID, "scaleOptional") for word in ("bLD", "BLd")),
        ({"self": "BlD"}, INVALID, "out"),
        *(
            ({name: word}, INVALID, name)
            for name in ("scaleOptional", "shiftOptional")
            for word in ("", "D", "B", "bD", "Bd", "b1D", "B1d", "1BD", "BDD", "B1D1")
        ),
        *(
            ({"out": word}, INVALID, "out")
            for word in ("", "BL", "bLD", "BlD", "BLd", "BLD1", "1BLD")
        ),
    ],
    "aclnnModulateBackward": [
        *(({name: None}, NULLPTR, name) for name in ("grad_output", "input", "grad_input")),
        *(({name: None}, NULLPTR, name) for name in ("grad_scale", "grad_shift")),
        ({"input": None, "grad_output": "BL"}, NULLPTR, "input"),
        ({"grad_shift": None, "scale": None}, NULLPTR, "grad_shift"),
        ({"scale": None}, INVALID, "grad_scale"),
        ({"shift": None}, INVALID, "grad_shift"),
        ({"scale": None, "shift": None}, INVALID, "grad_scale"),
        *(({"grad_output": word}, INVALID, "grad_output") for word in ("", "D", "BD", "BLDD")),
        *(({"grad_output": word}, INVALID, "input") for word in ("bLD", "BlD", "BLd")),
        *(
            ({name: word}, INVALID, name)
            for name in ("input", "grad_input")
            for word in ("", "BD", "BLDD", "1BLD", "bLD", "BlD", "BLd")
        ),
        *(
            ({name: word, f"grad_{name}": word}, INVALID, name)
            for name in ("scale", "shift")
            for word in ("", "D", "B", "B1D", "bD", "Bd", "1BD", "BlD")
        ),
        *(
            ({name: word}, INVALID, name)
            for name in ("grad_scale", "grad_shift")
            for word in ("", "D", "B1D", "bD", "Bd")
        ),
    ],
    "aclnnExpSegsum": [
        ({"self": None}, NULLPTR, "self"),
        ({"out": None}, NULLPTR, "out"),
        ({"self": "T", "out": None}, NULLPTR, "out"),
        *(
            ({"self": word, "out": word and f"{word}T"}, INVALID, "self")
            for word in ("", "T", "HT", "NNNHT")
        ),
        *(({"out": word}, INVALID, "out") for word in ("NHT", "NHTTT", "nHTT", "NhTT")),
        *(({"out": word}, INVALID, "out") for word in ("NHTt", "NHtT", "NHtt", "NTHT1")),
    ],
    "aclnnExpSegsumBackward": [
        *(({name: None}, NULLPTR, name) for name in ("gradOutput", "gradSelf", "gradInput")),
        ({"gradOutput": "T", "gradSelf": None}, NULLPTR, "gradSelf"),
        *(
            ({"gradOutput": word, "gradSelf": word, "gradInput": word[:-1]}, INVALID, "gradOutput")
            for word in ("", "T", "TT", "HTT", "NNNHTT", "NHTt", "NHtT", "NNHTt")
        ),
        *(
            ({"gradSelf": word}, INVALID, "gradSelf")
            for word in ("", "HTT", "1NHTT", "nHTT", "NhTT", "NHTt", "NHtT", "NHtt")
        ),
        *(
            ({"gradInput": word}, INVALID, "gradInput")
            for word in ("", "T", "HT", "nHT", "NhT", "NHt", "NHTT", "NHT1")
        ),
    ],
}


def refused_rows() -> list[tuple[str, dict[str, str | None], dict[str, int], int, str]]:
    """Every row with full and with empty tensors: the checks come before the early return."""
    rows = []
    for function, entries in REFUSED.items():
        for changes, status, named in entries:
            for sizes in SIZES:
                letters = set("".join(CALLS[function].values()))
                if sizes is FULL or any(sizes[axis] == 0 for axis in letters):
                    rows.append((function, changes, sizes, status, named))
    return rows
