"""Reads ``reported_cases.json``: the listed inputs and expectations as arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from oracle_bits import widen
from support import (
    array,
)

CASES = {
    c["id"]: c for c in json.loads(Path(__file__).with_name("reported_cases.json").read_text())
}


def numbers(values) -> np.ndarray:
    """Nested lists with "nan" and "inf" as float64."""
    if isinstance(values, list):
        return np.array([numbers(v) for v in values], np.float64)
    return np.float64(values)


def given(case: str, name: str, dtype: str | None = None) -> np.ndarray:
    """An input of a case, in its own dtype or another."""
    entry = CASES[case]["input_spec"][name]
    if isinstance(entry, list):
        entry = {"values": entry}
    dtype = dtype or entry.get("dtype", "float32")
    if "fill" in entry:
        return array(np.full(entry["shape"], entry["fill"]), dtype)
    return array(numbers(entry["values"]), dtype)


def expected(case: str, name: str):
    entry = CASES[case]["expected"][name]
    return numbers(entry["values"] if isinstance(entry, dict) else entry)


def same(got: np.ndarray, want) -> bool:
    """Equal values, NaN equal to NaN, after rounding ``want`` to the dtype of ``got``."""
    return np.array_equal(widen(got), widen(array(want, got.dtype.name)), equal_nan=True)
