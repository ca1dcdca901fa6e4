"""What an instruction gives by the PTX manual: opcode and operand bits -> result bits.

The second half of the independent model in ``model.py``; the spelling is read afresh here, without
the table of ``isa.py``. Only tests use it.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from . import model
from .model import FORMATS, Real, signed


def _float_operation(name: str, kind: str, ftz: bool, words: list[str], values: list[int]) -> int:
    real = Real(kind, ftz)
    if name == "testp":
        return int(real.property(words[0], values[0]))
    if name == "copysign":
        sign = real.format.sign
        return values[0] & sign | values[1] & (sign - 1)
    flushed = [real.flush(value) for value in values]
    operations: dict[str, Callable[..., int]] = {
        "add": real.add,
        "sub": lambda a, b: real.add(a, b ^ real.format.sign),
        "mul": real.multiply,
        "div": real.divide,
        "fma": real.fma,
        "rcp": lambda a: real.divide(real.format.encode(Fraction(1)), a),
        "sqrt": real.sqrt,
        "neg": lambda a: a ^ real.format.sign,
        "abs": lambda a: a & (real.format.sign - 1),
        "min": lambda a, b: real.extreme(a, b, False, "NaN" in words),
        "max": lambda a, b: real.extreme(a, b, True, "NaN" in words),
    }
    return operations[name](*flushed)


def _int_operation(name: str, kind: str, words: list[str], values: list[int]) -> int:
    width = int(kind[1:])
    numbers = [signed(v, width) if kind[0] == "s" else v for v in values]
    x, y = numbers[0], numbers[1] if len(numbers) > 1 else 0
    if name in ("mul", "mad"):
        product = x * y
        if "hi" in words:
            product >>= width
        if "wide" in words:
            width *= 2
        z = values[2] if name == "mad" else 0
        return (product + z) & ((1 << width) - 1)
    results: dict[str, Callable[[], int]] = {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "div": lambda: model._divide(x, y, False),
        "rem": lambda: model._divide(x, y, True),
        "min": lambda: min(x, y),
        "max": lambda: max(x, y),
        "neg": lambda: -x,
        "abs": lambda: abs(x),
    }
    return results[name]() & ((1 << width) - 1)


def _bit_operation(name: str, kind: str, words: list[str], values: list[int]) -> int:
    width = 1 if kind == "pred" else int(kind[1:])
    mask = (1 << width) - 1
    is_signed = kind[0] == "s"
    a = values[0]
    number = signed(a, width) if is_signed else a
    amount = min(values[1], width) if name in ("shl", "shr") else 0
    results: dict[str, Callable[[], int]] = {
        "and": lambda: a & values[1],
        "or": lambda: a | values[1],
        "xor": lambda: a ^ values[1],
        "not": lambda: ~a,
        "cnot": lambda: int(a == 0),
        "shl": lambda: a << amount,
        "shr": lambda: number >> amount,
        "popc": lambda: a.bit_count(),
        "clz": lambda: width - a.bit_length(),
        "brev": lambda: int(f"{a:0{width}b}"[::-1], 2),
        "bfe": lambda: model._extract(a, values[1], values[2], width, is_signed),
        "bfi": lambda: model._insert(a, values[1], values[2], values[3], width),
        "prmt": lambda: model._permute(*values),
    }
    if name == "bfind":
        return model._find(number, width, "shiftamt" in words)
    if name == "shf":
        count = values[2] % 32 if words[1] == "wrap" else min(values[2], 32)
        pair = values[1] << 32 | a
        return (pair << count >> 32 if words[0] == "l" else pair >> count) & 0xFFFFFFFF
    return results[name]() & mask


def _comparison(words: list[str], kind: str, values: list[int]) -> bool:
    name = words[0]
    if kind in FORMATS:
        return Real(kind, "ftz" in words).compare(name, *values[:2])
    x, y = (signed(v, int(kind[1:])) if kind[0] == "s" else v for v in values[:2])
    return model._ordered({"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name), x, y)


def _combine(words: list[str], test: bool, third: bool) -> bool:
    for word in words:
        if word in ("and", "or", "xor"):
            return {"and": test and third, "or": test or third, "xor": test != third}[word]
    return test


def setp(opcode: str, values: list[int]) -> tuple[bool, bool]:
    """Return both predicates of a ``setp p|q``."""
    _, *words, kind = opcode.split(".")
    test = _comparison(words, kind, values)
    third = bool(values[2]) if len(values) > 2 else False
    return _combine(words, test, third), _combine(words, not test, third)


def expected(opcode: str, values: list[int]) -> int:
    """Return the result's bits, or ``model.ANY_NAN``."""
    name, *words = opcode.split(".")
    if name == "cvt":
        return model.convert(words, values[0])
    kind = words.pop()
    if name == "set":
        result = words.pop()
        third = bool(values[2]) if len(values) > 2 else False
        true = 0x3F800000 if result == "f32" else 0xFFFFFFFF
        return true if _combine(words, _comparison(words, kind, values), third) else 0
    if name == "selp":
        return values[0] if values[2] else values[1]
    if name == "slct":
        positive = (
            _comparison(["ge", *words], "f32", [values[2], 0])
            if kind == "f32"
            else signed(values[2], 32) >= 0
        )
        return values[0] if positive else values[1]
    if kind in FORMATS:
        return _float_operation(name, kind, "ftz" in words, words, values)
    if name in [
        "and",
        "or",
        "xor",
        "not",
        "cnot",
        "shl",
        "shr",
        "popc",
        "clz",
        "brev",
        "bfe",
        "bfi",
        "bfind",
        "prmt",
        "shf",
    ]:
        return _bit_operation(name, kind, words, values)
    return _int_operation(name, kind, words, values)
