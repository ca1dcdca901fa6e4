"""An independent model of the instructions in ``isa.py``, on Python integers and fractions.

It shares no code and no arithmetic with the C++ side: numbers are decoded to exact fractions, the
operation is exact, and one rounding encodes the result. Only tests use it; it is slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor, isqrt
from typing import Any

Number = Fraction | str  # "inf", "-inf" and "nan" beside the finite numbers

ANY_NAN = -1  #: expected result: a NaN of any payload


@dataclass(frozen=True)
class Format:
    """A binary interchange format."""

    width: int
    fraction: int

    @property
    def bias(self) -> int:
        return (1 << (self.width - self.fraction - 2)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << (self.width - self.fraction - 1)) - 1) << self.fraction

    @property
    def sign(self) -> int:
        return 1 << (self.width - 1)

    def decode(self, bits: int) -> Number:
        magnitude = bits & (self.sign - 1)
        if magnitude > self.infinity:
            return "nan"
        if magnitude == self.infinity:
            return "-inf" if bits & self.sign else "inf"
        exponent = magnitude >> self.fraction
        significand = magnitude & ((1 << self.fraction) - 1)
        if exponent:
            significand |= 1 << self.fraction
        value = Fraction(significand) * Fraction(2) ** (
            max(exponent, 1) - self.bias - self.fraction
        )
        return -value if bits & self.sign else value

    def encode(self, value: Number, zero_sign: int = 0) -> int:
        """Round to nearest, ties to even; *zero_sign* is the sign if the result is zero."""
        if value == "nan":
            return ANY_NAN
        if isinstance(value, str):
            return self.infinity | (self.sign if value == "-inf" else 0)
        if value == 0:
            return zero_sign << (self.width - 1)
        sign = self.sign if value < 0 else 0
        exponent = max(_log2(abs(value)), 1 - self.bias)
        quantum = Fraction(2) ** (exponent - self.fraction)
        steps = round_even(abs(value) / quantum)
        # steps counts quanta: adding it to the biased exponent carries where it must.
        bits = ((exponent + self.bias - 1) << self.fraction) + steps
        return sign | min(bits, self.infinity)

    def is_subnormal(self, bits: int) -> bool:
        return 0 < bits & (self.sign - 1) < 1 << self.fraction


FORMATS = {
    "f16": Format(16, 10),
    "bf16": Format(16, 7),
    "f32": Format(32, 23),
    "f64": Format(64, 52),
}


def _log2(value: Fraction) -> int:
    """floor(log2(value)) of a positive fraction."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def round_even(value: Fraction) -> int:
    low = floor(value)
    rest = value - low
    return low + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2))


def signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) & 1 else bits


# ---- floating point ------------------------------------------------------------------------------


class Real:
    """Float arithmetic of one instruction: a type and whether subnormals are flushed."""

    def __init__(self, kind: str, ftz: bool) -> None:
        self.kind, self.format, self.ftz = kind, FORMATS[kind], ftz

    def flush(self, bits: int) -> int:
        if self.ftz and bits != ANY_NAN and self.format.is_subnormal(bits):
            return bits & self.format.sign
        return bits

    def result(self, value: Number, zero_sign: int = 0) -> int:
        bits = self.flush(self.format.encode(value, zero_sign))
        return 0x7FFFFFFF if bits == ANY_NAN and self.kind == "f32" else bits

    def negative(self, bits: int) -> int:
        return int(bool(bits & self.format.sign))

    def add(self, a: int, b: int) -> int:
        x, y = self.format.decode(a), self.format.decode(b)
        both = self.negative(a) and self.negative(b)
        return self.result(_sum(x, y), int(both))

    def multiply(self, a: int, b: int) -> int:
        x, y = self.format.decode(a), self.format.decode(b)
        sign = self.negative(a) ^ self.negative(b)
        return self.result(_product(x, y, sign), sign)

    def fma(self, a: int, b: int, c: int) -> int:
        x, y, z = (self.format.decode(v) for v in (a, b, c))
        sign = self.negative(a) ^ self.negative(b)
        product = _product(x, y, sign)
        # An exact zero is negative only if both the product and c are.
        return self.result(_sum(product, z), int(sign and self.negative(c)))

    def divide(self, a: int, b: int) -> int:
        x, y = self.format.decode(a), self.format.decode(b)
        sign = self.negative(a) ^ self.negative(b)
        infinity = "-inf" if sign else "inf"
        if "nan" in (x, y) or (x == y == 0) or (isinstance(x, str) and isinstance(y, str)):
            return self.result("nan")
        if isinstance(x, str) or y == 0:
            return self.result(infinity)
        if isinstance(y, str):
            return self.result(Fraction(0), sign)
        return self.result(x / y, sign)

    def sqrt(self, a: int) -> int:
        x = self.format.decode(a)
        if x in ("inf", 0):
            return a
        if isinstance(x, str) or x < 0:
            return self.result("nan")
        # Far more bits than any result has, and a sticky bit so that no tie is invented.
        scale = 1 << 700
        root = isqrt(int(x * scale * scale))
        exact = Fraction(root, scale)
        if exact * exact != x:
            exact += Fraction(1, scale * 4)
        return self.result(exact)

    def extreme(self, a: int, b: int, largest: bool, propagate: bool) -> int:
        x, y = self.format.decode(a), self.format.decode(b)
        if x == "nan" or y == "nan":
            if propagate or x == y:
                return self.result("nan")
            return b if x == "nan" else a
        key_a = (_order(x), -self.negative(a))
        key_b = (_order(y), -self.negative(b))
        return (max if largest else min)((key_a, a), (key_b, b))[1]

    def compare(self, name: str, a: int, b: int) -> bool:
        x, y = self.format.decode(self.flush(a)), self.format.decode(self.flush(b))
        unordered = "nan" in (x, y)
        if name in ("num", "nan"):
            return unordered == (name == "nan")
        if unordered:
            return name.endswith("u") and len(name) == 3
        return _ordered(name[:2], _order(x), _order(y))

    def property(self, name: str, a: int) -> bool:
        x = self.format.decode(a)
        subnormal = self.format.is_subnormal(a)
        return {
            "finite": not isinstance(x, str),
            "infinite": x in ("inf", "-inf"),
            "number": x != "nan",
            "notanumber": x == "nan",
            "normal": not isinstance(x, str) and x != 0 and not subnormal,
            "subnormal": subnormal,
        }[name]


def _order(x: Number) -> tuple[int, Fraction]:
    if isinstance(x, str):
        return ({"-inf": -1, "inf": 1}[x], Fraction(0))
    return (0, x)


def _sum(x: Number, y: Number) -> Number:
    if "nan" in (x, y) or {x, y} == {"inf", "-inf"}:
        return "nan"
    if isinstance(x, str):
        return x
    return y if isinstance(y, str) else x + y


def _product(x: Number, y: Number, sign: int) -> Number:
    if isinstance(x, str) or isinstance(y, str):
        return "nan" if "nan" in (x, y) or 0 in (x, y) else ("-inf" if sign else "inf")
    return x * y


def _ordered(name: str, x: Any, y: Any) -> bool:
    results: dict[str, bool] = {
        "eq": x == y,
        "ne": x != y,
        "lt": x < y,
        "le": x <= y,
        "gt": x > y,
        "ge": x >= y,
    }
    return results[name]


# ---- conversions --------------------------------------------------------------------------------


def to_integer(value: Fraction, mode: str) -> int:
    low = floor(value)
    exact = value == low
    return {
        "rni": round_even(value),
        "rzi": low if exact or value > 0 else low + 1,
        "rmi": low,
        "rpi": low if exact else low + 1,
    }[mode]


def saturate(value: int, target: str) -> int:
    width = int(target[1:])
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1)
    if target[0] == "u":
        low, high = 0, (1 << width) - 1
    return min(max(value, low), high) & ((1 << width) - 1)


def convert(words: list[str], a: int) -> int:
    """Model ``cvt``; *words* are its modifiers."""
    *modifiers, target, source = words
    ftz, rounding = "ftz" in modifiers, next((m for m in modifiers if m[0] == "r"), "")
    if source in FORMATS:
        real = Real(source, ftz and source == "f32")
        a = real.flush(a)
        value = real.format.decode(a)
        if target not in FORMATS:
            return _float_to_int(value, source, target, rounding)
        sign = real.negative(a)
        if rounding.endswith("i") and isinstance(value, Fraction):
            value = Fraction(to_integer(value, rounding))
        if target in ("f16", "bf16") and value == "nan":
            return 0x7FFF
        if target == "f32" and source == "bf16" and value == "nan":
            return a << 16  # only moves bits
        return Real(target, ftz and target == "f32").result(value, sign)
    width = int(source[1:])
    number = signed(a, width) if source[0] == "s" else a
    if target in FORMATS:
        return Real(target, False).result(Fraction(number))
    return saturate(number, target) if "sat" in modifiers else number & _mask(target)


def _float_to_int(value: Number, source: str, target: str, rounding: str) -> int:
    width = int(target[1:])
    if value == "nan":
        return 0 if source != "f64" and width != 64 else 1 << (width - 1)
    if isinstance(value, str):
        return saturate(-(1 << 100) if value == "-inf" else 1 << 100, target)
    return saturate(to_integer(value, rounding), target)


# ---- integers ------------------------------------------------------------------------------------


def _mask(kind: str) -> int:
    return (1 << int(kind.lstrip("subf"))) - 1


def _divide(x: int, y: int, remainder: bool) -> int:
    if y == 0:
        return x if remainder else -1
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return x - quotient * y if remainder else quotient


def _extract(a: int, position: int, length: int, width: int, is_signed: bool) -> int:
    """Bit by bit, as the definition of bfe is written."""
    position, length, top = position & 255, length & 255, width - 1
    sign = 0
    if is_signed and length:
        sign = a >> min(position + length - 1, top) & 1
    result = 0
    for i in range(width):
        inside = i < length and position + i <= top
        result |= (a >> (position + i) & 1 if inside else sign) << i
    return result


def _insert(a: int, b: int, position: int, length: int, width: int) -> int:
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i >= width:
            break
        b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def _permute(a: int, b: int, selector: int) -> int:
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    chosen = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data[nibble & 7]
        chosen.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(chosen), "little")


def _find(x: int, width: int, amount: bool) -> int:
    """Position of the highest bit unlike the sign."""
    pattern = ~x if x < 0 else x
    if pattern == 0:
        return 0xFFFFFFFF
    position = pattern.bit_length() - 1
    return width - 1 - position if amount else position
