"""The table of PTX instructions: full opcode with all modifiers -> what it computes.

The key is the whole spelling (``"cvt.rn.ftz.f32.f64"``). A spelling that is not a key is unknown
and stops the translation, so a modifier can never be ignored by accident. Left out on purpose:

* ``add.f32``, ``mul.f32``, ``sub.f32``, ``add.f64`` ... without a rounding modifier: ptxas may
  fuse them, so their bits are not defined by the PTX text;
* every ``.approx`` form: its result is a property of the hardware;
* calls, atomics, textures, local memory: the kernels under test have none.

Instructions with an irregular shape (mov, ld, st, cvta, bra, ret, barriers, shuffles, votes) are
in ``translate.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

WIDTH = {
    "pred": 1,
    **{kind + str(bits): bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
}


@dataclass(frozen=True)
class Form:
    """One instruction: the C++ operation, the types of its result and operands, its poison rule.

    *rule* names a wrapper of ``registers.h``; for ``moves`` the number of data operands follows.
    """

    operation: str
    result: str
    operands: tuple[str, ...]
    rule: str = "any"
    data: int = 0

    @property
    def call(self) -> str:
        """The C++ function to call, with its template arguments."""
        if self.rule == "moves":
            return f"moves<op::{self.operation}, {self.data}>"
        return f"{self.rule}<op::{self.operation}>"


Row = tuple[str, Form]

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
FTZ = {"f32": (("", "false"), (".ftz", "true")), "f64": (("", "false"),)}
DOUBLED = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _bits(kind: str) -> str:
    """C++ has no type for ``.b32``: untyped operands are computed as unsigned."""
    return kind.replace("b", "u") if kind.startswith("b") and kind != "bf16" else kind


def _floats() -> Iterator[tuple[str, str, str]]:
    for kind, choices in FTZ.items():
        for modifier, flag in choices:
            yield kind, modifier, f"op::{kind}, {flag}"


def _float_arithmetic() -> Iterator[Row]:
    for kind, ftz, arguments in _floats():
        for name, operation, count in (
            ("add.rn", "FloatAdd", 2),
            ("sub.rn", "FloatSub", 2),
            ("mul.rn", "FloatMul", 2),
            ("div.rn", "FloatDiv", 2),
            ("fma.rn", "FloatFma", 3),
            ("rcp.rn", "FloatRcp", 1),
            ("sqrt.rn", "FloatSqrt", 1),
            ("neg", "FloatNeg", 1),
            ("abs", "FloatAbs", 1),
        ):
            form = Form(f"{operation}<{arguments}>", kind, (kind,) * count)
            yield f"{name}{ftz}.{kind}", form
        for name, nan in product(("min", "max"), ("", ".NaN")):
            if nan and kind == "f64":
                continue
            flags = f"{str(name == 'max').lower()}, {str(bool(nan)).lower()}"
            form = Form(f"FloatExtreme<{arguments}, {flags}>", kind, (kind, kind))
            yield f"{name}{ftz}{nan}.{kind}", form
    for kind in FTZ:
        yield f"copysign.{kind}", Form(f"CopySign<op::{kind}>", kind, (kind, kind))
        for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            form = Form(f"TestProperty<op::{kind}, op::{what.upper()}>", "pred", (kind,))
            yield f"testp.{what}.{kind}", form


def _integer_arithmetic() -> Iterator[Row]:
    for kind in INTEGERS:
        t = f"op::{kind}"
        for name, operation, rule in (
            ("add", f"Add<{t}>", "any"),
            ("sub", f"Sub<{t}>", "any"),
            ("mul.lo", f"MulLo<{t}>", "any"),
            ("mul.hi", f"MulHi<{t}>", "any"),
            ("div", f"Divide<{t}, false>", "divides"),
            ("rem", f"Divide<{t}, true>", "divides"),
            ("min", f"Extreme<{t}, false>", "any"),
            ("max", f"Extreme<{t}, true>", "any"),
        ):
            yield f"{name}.{kind}", Form(operation, kind, (kind, kind), rule)
        for half, operation in (("lo", "MulLo"), ("hi", "MulHi")):
            form = Form(f"MulAdd<op::{operation}<{t}>>", kind, (kind,) * 3)
            yield f"mad.{half}.{kind}", form
    for kind, double in DOUBLED.items():
        operation = f"MulWide<op::{kind}>"
        yield f"mul.wide.{kind}", Form(operation, double, (kind, kind))
        form = Form(f"MulAdd<op::{operation}>", double, (kind, kind, double))
        yield f"mad.wide.{kind}", form
    for kind in SIGNED:
        yield f"neg.{kind}", Form(f"Neg<op::{kind}>", kind, (kind,))
        yield f"abs.{kind}", Form(f"Abs<op::{kind}>", kind, (kind,))


def _bit_operations() -> Iterator[Row]:
    for kind in ("pred", "b16", "b32", "b64"):
        t = f"op::{_bits(kind)}"
        for name in ("and", "or", "xor"):
            form = Form(f"{name.capitalize()}<{t}>", kind, (kind, kind), "logic")
            yield f"{name}.{kind}", form
        yield f"not.{kind}", Form(f"Not<{t}>", kind, (kind,), "logic")
    for kind in ("b16", "b32", "b64"):
        t = f"op::{_bits(kind)}"
        yield f"cnot.{kind}", Form(f"LogicalNot<{t}>", kind, (kind,))
        yield f"shl.{kind}", Form(f"ShiftLeft<{t}>", kind, (kind, "u32"), "moves", 1)
    for kind in ("b16", "b32", "b64", *INTEGERS):
        form = Form(f"ShiftRight<op::{_bits(kind)}>", kind, (kind, "u32"), "moves", 1)
        yield f"shr.{kind}", form
    for (side, left), (mode, wrap) in product(
        (("l", "true"), ("r", "false")), (("clamp", "false"), ("wrap", "true"))
    ):
        form = Form(f"FunnelShift<{left}, {wrap}>", "b32", ("b32", "b32", "u32"), "moves", 2)
        yield f"shf.{side}.{mode}.b32", form
    for kind in ("b32", "b64"):
        t = f"op::{_bits(kind)}"
        yield f"popc.{kind}", Form(f"PopCount<{t}>", "u32", (kind,))
        yield f"clz.{kind}", Form(f"LeadingZeros<{t}>", "u32", (kind,))
        yield f"brev.{kind}", Form(f"Reverse<{t}>", kind, (kind,), "moves", 1)
        form = Form(f"FieldInsert<{t}>", kind, (kind, kind, "u32", "u32"), "moves", 2)
        yield f"bfi.{kind}", form
    for kind in ("u32", "s32", "u64", "s64"):
        form = Form(f"FieldExtract<op::{kind}>", kind, (kind, "u32", "u32"), "moves", 1)
        yield f"bfe.{kind}", form
        for suffix, flag in (("", "false"), (".shiftamt", "true")):
            form = Form(f"FindBit<op::{kind}, {flag}>", "u32", (kind,))
            yield f"bfind{suffix}.{kind}", form
    yield "prmt.b32", Form("Permute", "b32", ("b32", "b32", "b32"), "moves", 2)


ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOAT_ONLY = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _comparisons() -> Iterator[tuple[str, str, str, str]]:
    """Yield comparison, .ftz, type and the C++ operation."""
    for kind in ("b16", "b32", "b64"):
        for name in ("eq", "ne"):
            yield name, "", kind, f"Test<op::{_bits(kind)}, op::{name.upper()}, false>"
    for kind in INTEGERS:
        names = {name: name for name in ORDERED}
        if kind in UNSIGNED:
            names |= UNSIGNED_NAMES
        for name, meaning in names.items():
            yield name, "", kind, f"Test<op::{kind}, op::{meaning.upper()}, false>"
    for kind, ftz, arguments in _floats():
        for name in (*ORDERED, *FLOAT_ONLY):
            meaning = "NAN_" if name == "nan" else name.upper()
            value, flag = arguments.split(", ")
            yield name, ftz, kind, f"Test<{value}, op::{meaning}, {flag}>"


def _set() -> Iterator[Row]:
    """``setp`` needs two results and has its own table; ``set`` stores the truth as a number."""
    for (name, ftz, kind, test), result in product(_comparisons(), ("u32", "s32", "f32")):
        form = Form(f"SetTo<op::{test}, op::{result}>", result, (kind, kind))
        yield f"set.{name}{ftz}.{result}.{kind}", form
        for combine in ("and", "or", "xor"):
            operation = f"SetToWith<op::{test}, op::{result}, op::{combine.capitalize()}<op::pred>>"
            form = Form(operation, result, (kind, kind, "pred"))
            yield f"set.{name}.{combine}{ftz}.{result}.{kind}", form


def _selection() -> Iterator[Row]:
    kinds = ("b16", "b32", "b64", *INTEGERS, "f32", "f64")
    for kind in kinds:
        t = f"op::{_bits(kind)}"
        yield f"selp.{kind}", Form(f"Select<{t}>", kind, (kind, kind, "pred"), "picks")
        for ftz, chooser, flag in (
            ("", "s32", "false"),
            ("", "f32", "false"),
            (".ftz", "f32", "true"),
        ):
            operation = f"SelectBySign<{t}, op::{chooser}, {flag}>"
            yield (
                f"slct{ftz}.{kind}.{chooser}",
                Form(operation, kind, (kind, kind, chooser), "picks"),
            )


CVT_INTEGERS = ("u8", "s8", *INTEGERS)
ROUND_TO_INTEGER = ("rni", "rzi", "rmi", "rpi")


def _integer_conversions() -> Iterator[Row]:
    for source, target in product(CVT_INTEGERS, CVT_INTEGERS):
        types = f"<op::{source}, op::{target}>"
        yield f"cvt.{target}.{source}", Form(f"Resize{types}", target, (source,), "moves", 1)
        yield f"cvt.sat.{target}.{source}", Form(f"ResizeSaturate{types}", target, (source,))


def _float_conversions() -> Iterator[Row]:
    for (kind, ftz, arguments), mode in product(_floats(), ROUND_TO_INTEGER):
        flag = arguments.split(", ")[1]
        for target in CVT_INTEGERS:
            operation = f"FloatToInt<op::{kind}, op::{target}, op::{mode.upper()}, {flag}>"
            # Float to integer always saturates: .sat says what holds anyway.
            for sat in ("", ".sat"):
                yield f"cvt.{mode}{ftz}{sat}.{target}.{kind}", Form(operation, target, (kind,))
        operation = f"RoundFloat<op::{kind}, op::{mode.upper()}, {flag}>"
        yield f"cvt.{mode}{ftz}.{kind}.{kind}", Form(operation, kind, (kind,))
    for source, target in product(CVT_INTEGERS, ("f32", "f64")):
        form = Form(f"IntToFloat<op::{source}, op::{target}>", target, (source,))
        yield f"cvt.rn.{target}.{source}", form
    for ftz, flag in FTZ["f32"]:
        yield f"cvt{ftz}.f64.f32", Form(f"SingleToDouble<{flag}>", "f64", ("f32",))
        yield f"cvt.rn{ftz}.f32.f64", Form(f"DoubleToSingle<{flag}>", "f32", ("f64",))
        # .ftz leaves half-precision subnormals alone, and as singles they are normal numbers.
        yield f"cvt{ftz}.f32.f16", Form("HalfToSingle", "f32", ("f16",))
        yield f"cvt.rn{ftz}.f16.f32", Form(f"SingleToHalf<{flag}>", "f16", ("f32",))
    yield "cvt.f64.f16", Form("HalfToDouble", "f64", ("f16",))
    yield "cvt.rn.f16.f64", Form("DoubleToHalf", "f16", ("f64",))
    yield "cvt.f32.bf16", Form("BfloatToSingle", "f32", ("bf16",), "moves", 1)
    yield "cvt.rn.bf16.f32", Form("SingleToBfloat", "bf16", ("f32",))


def _setp() -> Iterator[Row]:
    for name, ftz, kind, test in _comparisons():
        yield f"setp.{name}{ftz}.{kind}", Form(test, "pred", (kind, kind))
        for combine in ("and", "or", "xor"):
            form = Form(test, "pred", (kind, kind, "pred"), f"any|{combine.capitalize()}")
            yield f"setp.{name}.{combine}{ftz}.{kind}", form


INSTRUCTIONS: dict[str, Form] = dict(
    row
    for rows in (
        _float_arithmetic,
        _integer_arithmetic,
        _bit_operations,
        _set,
        _selection,
        _integer_conversions,
        _float_conversions,
    )
    for row in rows()
)

#: ``setp`` by spelling; the rule is ``any`` or ``any|And`` when a predicate is combined in.
SETP: dict[str, Form] = dict(_setp())
