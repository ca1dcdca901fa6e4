"""Every instruction and modifier of the table, against the exact model and bits worked out by hand.

Kernels are written as PTX here: thread i loads the i-th operands, runs all instructions that take
such operands, and stores every result.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest

from ptx import Executor, Memory, Module, memory, model, reference
from ptx.isa import INSTRUCTIONS, SETP, WIDTH, Form

HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"
MODES = {"plain": (), "checked": ("memcheck", "initcheck")}
CHUNK = 160  # instructions in one kernel

# ---- operand values -----------------------------------------------------------------------------

SINGLES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00400000,
    0x00800000, 0x80800000, 0x00800001, 0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF,
    0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000, 0xC0200000, 0x33800000, 0x33800001,
    0x4B800000, 0x4B800001, 0x4F000000, 0xCF000000, 0x4EFFFFFF, 0x4F800000, 0x5F000000,
    0xDF000000, 0x5F800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
    0xFFC12345, 0x7F812345, 0x477FE000, 0x477FF000, 0x477FEFFF, 0x387FC000, 0x387FE000,
    0x33000000, 0x33000001, 0x42FE0000, 0x43000000, 0xC3000000, 0xC3008000, 0x437F8000,
    0x40400000, 0x1E800000, 0x9E800000, 0x3F808000, 0x3F818000, 0x7F7F8000,
]  # fmt: skip
DOUBLES = [
    0, 1 << 63, 1, 0x800FFFFFFFFFFFFF, 0x0010000000000000, 0x8010000000000001,
    0x3FF0000000000000, 0xBFF0000000000000, 0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF,
    0x3FE0000000000000, 0xBFE0000000000000, 0x3FF8000000000000, 0x4004000000000000,
    0x41DFFFFFFFC00000, 0x41DFFFFFFFE00000, 0x41E0000000000000, 0xC1E0000000200000,
    0x43E0000000000000, 0xC3E0000000000000, 0x43F0000000000000, 0x7FEFFFFFFFFFFFFF,
    0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF0000000000001,
    0x380FFFFFFFFFFFFF, 0x3690000000000000, 0x3690000000000001, 0x36A8000000000000,
    0x47EFFFFFEFFFFFFF, 0x47EFFFFFF0000000, 0x3FF0000010000000, 0x3FF0000030000000,
    0x3FF0000010000001, 0x40EFFDFFFFFFFFFF, 0x40EFFE0000000000, 0x3E60000000000000,
    0x3E60000000000001, 0x3F10000000000000, 0x3CB0000000000000, 0x405FC00000000000,
    0xC060100000000000,
]  # fmt: skip
HALVES = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x3C01, 0x7BFF, 0xFBFF,
    0x7C00, 0xFC00, 0x7E00, 0xFD55, 0x0200, 0x5640,
]  # fmt: skip


def integers(width: int) -> list[int]:
    top = 1 << (width - 1)
    values = [0, 1, 2, 3, 7, 31, 32, 33, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2]
    values += [0x55555555_55555555, 0x0123456789ABCDEF, 0xFEDCBA9876543210, 63, 64, 65, 255, 256]
    return [value & (2 * top - 1) for value in values]


def values_of(kind: str) -> list[int]:
    if kind == "pred":
        return [0, 1]
    if kind in ("f16", "bf16"):
        return HALVES
    if kind in ("f32", "f64"):
        return SINGLES if kind == "f32" else DOUBLES
    return integers(WIDTH[kind])


def operands(kinds: tuple[str, ...], limit: int) -> list[tuple[int, ...]]:
    """All combinations of the special values, or a fixed sample of them, and random bits."""
    random_ = random.Random(f"{kinds}")
    pools = [values_of(kind) for kind in kinds]
    total = np.prod([len(pool) for pool in pools])
    if total <= limit:
        found = list(itertools.product(*pools))
    else:
        found = [tuple(random_.choice(pool) for pool in pools) for _ in range(limit)]
    for _ in range(limit // 4):
        found.append(tuple(random_.getrandbits(WIDTH[kind]) for kind in kinds))
    return found


# ---- kernels ------------------------------------------------------------------------------------


def storage(kind: str) -> int:
    """Bytes of an operand in memory."""
    return max(WIDTH[kind], 8) // 8


def register(kind: str, index: int | str) -> str:
    letter = {1: "p", 8: "h", 16: "h", 32: "w", 64: "d"}[WIDTH[kind]]
    return f"%{letter}{index}"


def memory_type(kind: str) -> str:
    return f"u{8 * storage(kind)}"


def kernel(instructions: list[tuple[str, Form]], name: str = "k") -> str:
    """One kernel for instructions of equal operand and result types; operands in p0, p1, ..."""
    form = instructions[0][1]
    kinds = form.operands
    results = 2 if form.rule.startswith("any|") or instructions[0][0].startswith("setp") else 1
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(kinds) + 1))
    lines = [
        f"{HEADER}.visible .entry {name}({parameters}, .param .u32 n)",
        "{ .reg .pred %p<9>; .reg .pred %out; .reg .b16 %h<9>; .reg .b32 %w<9>; .reg .b32 %i<9>;",
        ".reg .b64 %d<9>; .reg .b64 %a<9>; .reg .pred %q<3>;",
        "mov.u32 %i0, %ctaid.x; mov.u32 %i1, %ntid.x; mov.u32 %i2, %tid.x;",
        "mad.lo.s32 %i3, %i0, %i1, %i2; ld.param.u32 %i4, [n];",
        "setp.ge.u32 %q0, %i3, %i4; @%q0 ret;",
    ]
    for index, kind in enumerate(kinds):
        lines += [
            f"ld.param.u64 %a0, [p{index}]; mad.wide.u32 %a1, %i3, {storage(kind)}, %a0;",
            f"ld.global.{memory_type(kind)} "
            + (f"%h8, [%a1]; setp.ne.u16 %p{index}, %h8, 0;" if kind == "pred" else "")
            + ("" if kind == "pred" else f"{register(kind, index)}, [%a1];"),
        ]
    lines.append(
        f"ld.param.u64 %a2, [p{len(kinds)}]; mad.wide.u32 %a3, %i3, {storage(form.result)}, %a2;"
        f"mul.wide.u32 %a4, %i4, {storage(form.result)};"
    )
    sources = ", ".join(register(kind, index) for index, kind in enumerate(kinds))
    for opcode, _ in instructions:
        targets = ["%q1", "%q2"][:results] if form.result == "pred" else [register(form.result, 7)]
        lines.append(f"{opcode} {'|'.join(targets)}, {sources};")
        for target in targets:
            if form.result == "pred":
                lines.append(f"selp.b16 %h7, 1, 0, {target};")
                target = "%h7"
            lines.append(f"st.global.{memory_type(form.result)} [%a3], {target};")
            lines.append("add.u64 %a3, %a3, %a4;")
    return "\n".join([*lines, "ret; }"])


def run_kernel(text: str, kinds: tuple[str, ...], result: str, rows: int, tuples, checks):
    """Run over operand tuples; return the results as a list of rows."""
    mem = Memory()
    arguments = []
    for index, kind in enumerate(kinds):
        data = np.array([values[index] for values in tuples], f"u{storage(kind)}")
        arguments.append(mem.register(memory.copy(data), f"p{index}", readonly=True))
    out = memory.empty((rows, len(tuples)), f"u{storage(result)}")
    arguments += [mem.register(out, "out", poison=True), np.uint32(len(tuples))]
    grid = (-(-len(tuples) // 128),)
    Executor(mem, checks=checks).launch(Module(text), "k", grid=grid, block=(128,), args=arguments)
    if checks:
        mem.check_written("out")
    return out.tolist()


def groups(table: dict[str, Form]) -> dict[str, list[tuple[str, Form]]]:
    found: dict[tuple, list[tuple[str, Form]]] = defaultdict(list)
    for opcode, form in table.items():
        divides = form.rule == "divides"
        found[opcode.partition(".")[0] == "cvt", form.operands, form.result, divides].append(
            (opcode, form)
        )
    named = {}
    for (cvt, kinds, result, divides), members in found.items():
        for start in range(0, len(members), CHUNK):
            kind = "cvt" if cvt else "divide" if divides else "op"
            label = f"{kind}-{'_'.join(kinds)}-{result}-{start // CHUNK}"
            named[label] = members[start : start + CHUNK]
    return named


INSTRUCTION_GROUPS = groups(INSTRUCTIONS)
SETP_GROUPS = groups(SETP)


def is_nan(bits: int, kind: str) -> bool:
    return kind in model.FORMATS and model.FORMATS[kind].decode(bits) == "nan"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", INSTRUCTION_GROUPS)
def test_instruction_matches_the_exact_model(group: str, mode: str) -> None:
    members = INSTRUCTION_GROUPS[group]
    form = members[0][1]
    tuples = operands(form.operands, 300 if len(members) < 40 else 120)
    if form.rule == "divides":  # by zero is undefined, and poison: tested apart
        tuples = [values for values in tuples if values[1]]
    got = run_kernel(kernel(members), form.operands, form.result, len(members), tuples, MODES[mode])
    for (opcode, _), row in zip(members, got, strict=True):
        for values, bits in zip(tuples, row, strict=True):
            want = reference.expected(opcode, list(values))
            if want == model.ANY_NAN and is_nan(bits, form.result):
                continue
            shown = [f"{value:#x}" for value in values]
            assert bits == want, f"{opcode} {shown}: got {bits:#x}, expected {want:#x}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", SETP_GROUPS)
def test_setp_matches_the_exact_model(group: str, mode: str) -> None:
    members = SETP_GROUPS[group]
    form = members[0][1]
    tuples = operands(form.operands, 200)
    got = run_kernel(kernel(members), form.operands, "pred", 2 * len(members), tuples, MODES[mode])
    for index, (opcode, _) in enumerate(members):
        for column, values in enumerate(tuples):
            p, q = reference.setp(opcode, list(values))
            pair = (got[2 * index][column], got[2 * index + 1][column])
            shown = [f"{value:#x}" for value in values]
            assert pair == (p, q), f"{opcode} {shown}: got {pair}, expected {(p, q)}"


# ---- by hand ------------------------------------------------------------------------------------

BY_HAND = [
    # subnormals: kept without .ftz, flushed to a zero of their sign with it
    ("add.rn.f32", (0x00000001, 0x00000001), 0x00000002),
    ("add.rn.ftz.f32", (0x00000001, 0x00000001), 0x00000000),
    ("add.rn.ftz.f32", (0x80000001, 0x80000001), 0x80000000),
    ("mul.rn.f32", (0x00800000, 0x3F000000), 0x00400000),
    ("mul.rn.ftz.f32", (0x00800000, 0x3F000000), 0x00000000),
    ("mul.rn.ftz.f32", (0x80800000, 0x3F000000), 0x80000000),
    ("mul.rn.ftz.f32", (0x007FFFFF, 0x7F000000), 0x00000000),
    ("cvt.ftz.f64.f32", (0x80000001,), 0x8000000000000000),
    ("cvt.f64.f32", (0x00000001,), 0x36A0000000000000),
    ("cvt.rn.ftz.f32.f64", (0x380FFFFFC0000000,), 0x00000000),
    ("cvt.rn.f32.f64", (0x380FFFFFC0000000,), 0x007FFFFF),
    # ties to even
    ("add.rn.f32", (0x3F800000, 0x33800000), 0x3F800000),
    ("add.rn.f32", (0x3F800001, 0x33800000), 0x3F800002),
    ("cvt.rn.f16.f32", (0x3F801000,), 0x3C00),
    ("cvt.rn.f16.f32", (0x3F803000,), 0x3C02),
    ("cvt.rn.f16.f32", (0x33000000,), 0x0000),  # 2^-25, half the smallest subnormal
    ("cvt.rn.f16.f32", (0x33000001,), 0x0001),
    ("cvt.rn.f16.f32", (0x477FEFFF,), 0x7BFF),
    ("cvt.rn.f16.f32", (0x477FF000,), 0x7C00),
    ("cvt.rn.f16.f32", (0x7FC00000,), 0x7FFF),
    ("cvt.f32.f16", (0x0001,), 0x33800000),
    ("cvt.f32.f16", (0xFC00,), 0xFF800000),
    ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),
    ("cvt.rn.bf16.f32", (0x3F818000,), 0x3F82),
    ("cvt.rni.s32.f32", (0x3F000000,), 0),
    ("cvt.rni.s32.f32", (0x3FC00000,), 2),
    ("cvt.rni.s32.f32", (0xC0200000,), 0xFFFFFFFE),
    # saturation and NaN
    ("cvt.rzi.s32.f32", (0x4F000000,), 0x7FFFFFFF),
    ("cvt.rzi.u32.f32", (0xBF800000,), 0),
    ("cvt.rzi.s32.f32", (0x7FC00000,), 0),
    ("cvt.rzi.s64.f32", (0x7FC00000,), 0x8000000000000000),
    ("cvt.rzi.s32.f64", (0x7FF8000000000000,), 0x80000000),
    ("cvt.sat.u8.s32", (0xFFFFFFFF,), 0),
    ("cvt.sat.s8.s32", (200,), 0x7F),
    # signed zeros, NaN, infinities
    ("add.rn.f32", (0x80000000, 0x80000000), 0x80000000),
    ("add.rn.f32", (0x3F800000, 0xBF800000), 0x00000000),
    ("add.rn.f32", (0x7F800000, 0xFF800000), 0x7FFFFFFF),
    ("mul.rn.f32", (0x7F800000, 0x80000000), 0x7FFFFFFF),
    ("min.f32", (0x00000000, 0x80000000), 0x80000000),
    ("max.f32", (0x80000000, 0x00000000), 0x00000000),
    ("min.f32", (0x7FC00000, 0x3F800000), 0x3F800000),
    ("max.NaN.f32", (0x7FC00000, 0x3F800000), 0x7FFFFFFF),
    ("max.f32", (0x7FC00000, 0xFFC00000), 0x7FFFFFFF),
    # a fused multiply-add keeps what two roundings lose: (1+2^-23)(1-2^-23) - 1 = -2^-46
    ("fma.rn.f32", (0x3F800001, 0x3F7FFFFE, 0xBF800000), 0xA8800000),
    # integers
    ("mul.hi.s32", (0xFFFFFFFF, 0x7FFFFFFF), 0xFFFFFFFF),
    ("mul.hi.u64", (0xFFFFFFFFFFFFFFFF,) * 2, 0xFFFFFFFFFFFFFFFE),
    ("mul.wide.s32", (0xFFFFFFFF, 2), 0xFFFFFFFFFFFFFFFE),
    ("mad.wide.u32", (0xFFFFFFFF, 0xFFFFFFFF, 1), 0xFFFFFFFE00000002),
    ("div.s32", (0x80000000, 0xFFFFFFFF), 0x80000000),
    ("div.s32", (0xFFFFFFF9, 2), 0xFFFFFFFD),
    ("rem.s32", (0xFFFFFFF9, 2), 0xFFFFFFFF),
    ("div.u32", (7, 0), 0xFFFFFFFF),
    ("rem.u32", (7, 0), 7),
    ("shl.b32", (1, 32), 0),
    ("shl.b32", (1, 0x80000000), 0),
    ("shl.b64", (1, 64), 0),
    ("shr.s32", (0x80000000, 99), 0xFFFFFFFF),
    ("shr.u64", (1 << 63, 63), 1),
    ("shr.u64", (1 << 63, 64), 0),
    ("bfe.s32", (0x000000F0, 4, 4), 0xFFFFFFFF),
    ("bfe.u32", (0x000000F0, 4, 4), 0xF),
    ("bfi.b32", (0xF, 0, 28, 8), 0xF0000000),
    ("prmt.b32", (0x33221100, 0x77665544, 0x5410), 0x55441100),
    ("prmt.b32", (0x00000080, 0, 0x888C), 0xFFFFFF00),
    ("shf.l.wrap.b32", (0x80000000, 1, 33), 0x00000003),
    ("shf.r.clamp.b32", (0x80000000, 1, 40), 0x00000001),
    ("clz.b64", (1,), 63),
    ("popc.b32", (0xF0F0,), 8),
    ("bfind.u32", (0,), 0xFFFFFFFF),
    ("bfind.s32", (0xFFFFFFFE,), 0),
    ("cvt.s64.s32", (0xFFFFFFFF,), 0xFFFFFFFFFFFFFFFF),
    ("cvt.u64.u32", (0xFFFFFFFF,), 0xFFFFFFFF),
    ("cvt.s32.s8", (0x80,), 0xFFFFFF80),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "values", "want"), BY_HAND)
def test_bits_worked_out_by_hand(opcode: str, values: tuple[int, ...], want: int) -> None:
    assert reference.expected(opcode, list(values)) == want
    form = INSTRUCTIONS[opcode]
    group = next(members for members in INSTRUCTION_GROUPS.values() if (opcode, form) in members)
    rows = run_kernel(kernel(group), form.operands, form.result, len(group), [values], ())
    assert rows[group.index((opcode, form))][0] == want
