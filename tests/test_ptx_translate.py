"""Instructions of irregular shape, what is refused, and how poison travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx import Executor, Kind, LaunchError, Memory, Module, PtxError, memory, nvrtc
from ptx.handmade import HEADER, REGISTERS, run, text_of

both_modes = pytest.mark.parametrize("checks", [(), "all"], ids=["plain", "checked"])

# ---- moves, loads, stores -----------------------------------------------------------------------


@both_modes
def test_vector_moves_split_and_join(checks: Any) -> None:
    body = """ld.global.u64 %d2, [%d0];
    mov.b64 {%r1, %r2}, %d2; mov.b64 %d3, {%r2, %r1}; st.global.u64 [%d1], %d3;
    mov.b32 {%h1, %h2}, %r1; mov.b32 %r3, {%h2, %h1}; st.global.u32 [%d1+8], %r3;
    mov.b64 {%h3, %h4, %h5, %h6}, %d2; mov.b64 %d4, {%h6, %h5, %h4, %h3};
    st.global.u64 [%d1+16], %d4; mov.b64 {_, %r4}, %d2; st.global.u32 [%d1+12], %r4;"""
    got = run(body, np.array([0x0011223344556677], "u8"), 3, "u8", checks=checks)
    assert [hex(v) for v in got.tolist()] == [
        "0x4455667700112233",
        "0x1122336677" + "4455",
        "0x6677445522330011",
    ]


@both_modes
def test_loads_extend_and_stores_truncate(checks: Any) -> None:
    body = """ld.global.s8 %r1, [%d0]; ld.global.u8 %r2, [%d0]; ld.global.s8 %h1, [%d0];
    ld.global.s16 %r3, [%d0]; ld.global.u16 %r4, [%d0]; ld.global.s32 %d2, [%d0];
    ld.global.u32 %d3, [%d0]; ld.global.nc.L1::no_allocate.u8 %h2, [%d0+1];
    st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2; st.global.u16 [%d1+8], %h1;
    st.global.u16 [%d1+10], %h2; st.global.u32 [%d1+12], %r3; st.global.u32 [%d1+16], %r4;
    st.global.u64 [%d1+24], %d2; st.global.u64 [%d1+32], %d3;
    st.global.u8 [%d1+20], %r1; st.global.u8 [%d1+21], %h2; st.global.u16 [%d1+22], %r3;"""
    got = run(body, np.array([0xFEDCBA98], "u4"), 10, "u4", checks=checks).tolist()
    want = [0xFFFFFF98, 0x98, 0x00BAFF98, 0xFFFFBA98, 0xBA98, 0xBA98BA98]
    want += [0xFEDCBA98, 0xFFFFFFFF, 0xFEDCBA98, 0]
    assert [hex(v) for v in got] == [hex(v) for v in want]


@both_modes
@pytest.mark.parametrize(
    ("kind", "letter", "dtype"),
    [("u8", "r", "u1"), ("u16", "h", "u2"), ("b32", "r", "u4"), ("f32", "f", "f4")],
)
@pytest.mark.parametrize("count", [2, 4])
def test_vectors_load_and_store(
    kind: str, letter: str, dtype: str, count: int, checks: Any
) -> None:
    names = ", ".join(f"%{letter}{i + 1}" for i in range(count))
    body = f"""ld.global.v{count}.{kind} {{{names}}}, [%d0];
    st.global.v{count}.{kind} [%d1], {{{names}}};"""
    x = np.arange(1, count + 1).astype(dtype)
    assert np.array_equal(run(body, x, count, dtype, checks=checks), x)


@both_modes
def test_generic_addresses_reach_shared_and_global_memory(checks: Any) -> None:
    scope = ".shared .align 8 .b8 pad[6]; .shared .align 4 .u32 cell;"
    body = """ld.u32 %r1, [%d0]; mov.u64 %d2, cell; cvta.shared.u64 %d3, %d2; st.u32 [%d3], %r1;
    cvta.to.shared.u64 %d4, %d3; ld.shared.u32 %r2, [%d4]; mov.u32 %r5, pad; mov.u32 %r6, cell;
    ld.shared.u32 %r3, [cell]; ld.shared.u32 %r4, [%r6]; add.u32 %r7, %r4, %r5;
    cvta.to.global.u64 %d5, %d1; cvta.global.u64 %d6, %d5; st.v2.u32 [%d6], {%r2, %r3};
    st.global.v2.u32 [%d1+8], {%r7, %r6};"""
    got = run(body, np.array([77], "u4"), 4, "u4", checks=checks, module_scope=scope)
    assert got.tolist() == [77, 77, 77, 8]


@both_modes
def test_tables_keep_their_initial_values(checks: Any) -> None:
    scope = """.const .align 4 .b8 bytes[8] = {1, 2, 3, 4, 255};
    .global .align 4 .u32 words[3] = {7, 0x10, -1};
    .const .align 4 .f32 singles[2] = {0f3F800000, 0fC0000000};"""
    body = """mov.u64 %d2, bytes; ld.const.u32 %r1, [%d2]; ld.const.u32 %r2, [bytes+4];
    ld.global.u32 %r3, [words+4]; ld.global.u32 %r4, [words+8]; ld.const.u32 %r5, [singles+4];
    st.global.v2.u32 [%d1], {%r1, %r2}; st.global.v2.u32 [%d1+8], {%r3, %r4};
    st.global.u32 [%d1+16], %r5;"""
    got = run(body, np.zeros(1, "u4"), 5, "u4", checks=checks, module_scope=scope)
    assert got.tolist() == [0x04030201, 0xFF, 0x10, 0xFFFFFFFF, 0xC0000000]


def test_a_table_is_read_only() -> None:
    scope = ".global .align 4 .u32 words[2] = {7, 8};"
    with pytest.raises(LaunchError) as caught:
        run("st.global.u32 [words], %r0;", [0], 1, "u4", module_scope=scope)
    assert caught.value.kind == Kind.READ_ONLY


@both_modes
def test_many_parameters_and_structs_lie_where_the_abi_puts_them(checks: Any) -> None:
    kinds = ["u8", "u64", "f32", "u16", "f64", "u8", "s32"] * 6
    parameters = [f".param .{kind} p{i}" for i, kind in enumerate(kinds)]
    parameters += [".param .align 8 .b8 s[24]", ".param .u64 y"]
    lines = ["ld.param.u64 %d1, [y];"]
    registers = {1: "%h1", 2: "%h2", 4: "%r1", 8: "%d2"}
    sizes = [int(kind[1:]) // 8 for kind in kinds]
    for i, size in enumerate(sizes):
        bits = f"u{8 * size}"
        lines.append(f"ld.param.{bits} {registers[size]}, [p{i}];")
        lines.append(f"st.global.{bits} [%d1+{8 * i}], {registers[size]};")
    lines.append("ld.param.v2.u32 {%r1, %r2}, [s+8]; st.global.v2.u32 [%d1+336], {%r1, %r2};")
    text = f"{HEADER}.entry k({', '.join(parameters)}) {{ {REGISTERS} {' '.join(lines)} ret; }}"
    out = memory.empty(43, "u8")
    out[:] = 0
    mem = Memory()
    values = [np.dtype(kind[0].replace("s", "i") + str(int(kind[1:]) // 8)).type(i + 1)
              for i, kind in enumerate(kinds)]  # fmt: skip
    struct = np.array([5, 6, 7], "u8").tobytes()
    args = [*values, struct, mem.register(out, "y")]
    Executor(mem, checks=checks).launch(Module(text), "k", grid=(1,), block=(1,), args=args)
    raw = out.view(np.uint8).reshape(43, 8)
    for i, value in enumerate(values):
        assert raw[i, : value.nbytes].tobytes() == value.tobytes()
    assert out[42] == 6


@both_modes
def test_inline_blocks_have_their_own_registers_and_labels(checks: Any) -> None:
    body = """mov.u32 %r1, 5; setp.eq.u32 %p1, %r0, 0;
    { .reg .b32 %r1, lo; .reg .pred q; mov.u32 %r1, 9; mov.u32 lo, %r1; setp.ne.u32 q, lo, 9;
      @q bra $skip; st.global.u32 [%d1+4], lo; $skip: }
    @!%p1 bra $skip; st.global.u32 [%d1], %r1; $skip:"""
    assert run(body, [0], 2, "u4", checks=checks).tolist() == [5, 9]


@both_modes
def test_lop3_is_its_table(checks: Any) -> None:
    lines = [f"lop3.b32 %r4, %r1, %r2, %r3, {t}; st.global.u32 [%d1+{4 * t}], %r4;"
             for t in range(256)]  # fmt: skip
    body = "ld.global.v4.u32 {%r1, %r2, %r3, _}, [%d0]; " + " ".join(lines)
    x = np.array([0xF0, 0xCC, 0xAA, 0], "u4")
    got = run(body, x, 256, "u4", checks=checks)
    assert (got & 0xFF).tolist() == list(range(256))


@both_modes
def test_special_registers(checks: Any) -> None:
    names = [
        *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
        *("%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt"),
        *("%lanemask_ge", "WARP_SZ"),
    ]
    stores = [f"mov.u32 %r1, {name}; st.global.u32 [%d3+{4 * i}], %r1;"
              for i, name in enumerate(names)]  # fmt: skip
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y;
    mad.lo.u32 %r4, %r1, %r2, %r3; mul.lo.u32 %r4, %r4, 24; mov.u32 %r1, %tid.z;
    mad.lo.u32 %r4, %r1, 12, %r4; mov.u32 %r1, %tid.y; mad.lo.u32 %r4, %r1, 4, %r4;
    add.u32 %r4, %r4, %r0; mul.wide.u32 %d2, %r4, 76; add.u64 %d3, %d1, %d2;"""
    mem = Memory()
    out = memory.empty((2, 3, 2, 3, 4, len(names)), "u4")
    args = [mem.register(out, "x"), mem.register(out, "y")]
    module = Module(text_of(body + " ".join(stores)))
    Executor(mem, checks=checks).launch(module, "k", grid=(2, 3), block=(4, 3, 2), args=args)
    for (bx, by, z, y, x), row in zip(np.ndindex(out.shape[:-1]), out.reshape(-1, 19), strict=True):
        lane = x + 4 * y + 12 * z
        masks = [1 << lane, (1 << lane) - 1, (2 << lane) - 1]
        masks += [0xFFFFFFFF ^ masks[2], 0xFFFFFFFF ^ masks[1]]
        assert row.tolist() == [x, y, z, 4, 3, 2, bx, by, 0, 2, 3, 1, lane, *masks, 32]


# ---- warp operations ----------------------------------------------------------------------------


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The source lane and validity, as the definition of shfl.sync is written."""
    segment, clamp = c >> 8 & 31, c & 31
    most = lane & segment | clamp & ~segment
    least = lane & segment
    if mode == "up":
        source, valid = lane - b, lane - b >= most
    elif mode == "down":
        source, valid = lane + b, lane + b <= most
    elif mode == "bfly":
        source, valid = lane ^ b, lane ^ b <= most
    else:
        source = least | b & ~segment
        valid = source <= most
    return (source if valid else lane), valid


@both_modes
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(mode: str, width: int, checks: Any) -> None:
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    lines = []
    for b in range(32):
        lines.append(
            f"shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1; selp.u32 %r3, 1, 0, %p1;"
            f"st.global.v2.u32 [%d2+{8 * b}], {{%r2, %r3}};"
        )
    body = "add.u32 %r1, %r0, 100; mad.wide.u32 %d2, %r0, 256, %d1;" + " ".join(lines)
    got = run(body, [0], (32, 32, 2), "u4", checks=checks, threads=32)
    for lane in range(32):
        for b in range(32):
            source, valid = shuffled(mode, lane, b, c)
            assert got[lane, b].tolist() == [100 + source, valid]


@both_modes
def test_votes(checks: Any) -> None:
    body = """and.b32 %r1, %r0, 1; setp.eq.u32 %p1, %r1, 1; setp.lt.u32 %p2, %r0, 99;
    vote.sync.ballot.b32 %r2, %p1, -1; vote.sync.any.pred %p3, %p1, -1;
    vote.sync.all.pred %p4, %p1, -1; vote.sync.uni.pred %p5, %p2, -1; selp.u32 %r3, 1, 0, %p3;
    selp.u32 %r4, 1, 0, %p4; selp.u32 %r5, 1, 0, %p5; mad.wide.u32 %d2, %r0, 16, %d1;
    st.global.v4.u32 [%d2], {%r2, %r3, %r4, %r5};"""
    got = run(body, [0], (40, 4), "u4", checks=checks, threads=40)
    assert (got[:32] == [0xAAAAAAAA, 1, 0, 1]).all()
    assert (got[32:] == [0xAA, 1, 0, 1]).all()  # a warp that is not full


@both_modes
def test_a_warp_may_split_by_masks(checks: Any) -> None:
    body = """mov.u32 %r1, %r0; setp.lt.u32 %p1, %r0, 16; @%p1 bra $low;
    shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff0000; bra.uni $join;
    $low: shfl.sync.bfly.b32 %r1, %r0, 8, 31, 0x0000ffff;
    $join: bar.warp.sync -1; mad.wide.u32 %d2, %r0, 4, %d1; st.global.u32 [%d2], %r1;"""
    got = run(body, [0], 32, "u4", checks=checks, threads=32)
    assert got.tolist() == [i ^ 8 if i < 16 else i ^ 1 for i in range(32)]


def test_different_operations_under_one_mask_are_found() -> None:
    body = """setp.lt.u32 %p1, %r0, 16; @%p1 bra $low;
    shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; bra.uni $join;
    $low: shfl.sync.up.b32 %r1, %r0, 1, 0, -1; $join: ret;"""
    with pytest.raises(LaunchError) as caught:
        run(body, [0], 1, "u4", threads=32)
    assert caught.value.kind == Kind.WARP_MISMATCH


def test_trap_stops_the_launch() -> None:
    with pytest.raises(LaunchError) as caught:
        run("trap;", [0], 1, "u4", checks=())
    assert caught.value.kind == Kind.TRAPPED


# ---- refusals -----------------------------------------------------------------------------------

REFUSED = {
    "atom.global.add.f32 %f1, [%d0], %f2;": "atomics are refused",
    "red.global.add.u32 [%d0], %r1;": "atomics are refused",
    "ex2.approx.ftz.f32 %f1, %f2;": "approximate",
    "div.full.f32 %f1, %f2, %f3;": "approximate",
    "rsqrt.approx.f32 %f1, %f2;": "approximate",
    "add.f32 %f1, %f2, %f3;": "no rounding modifier",
    "mul.ftz.f32 %f1, %f2, %f3;": "no rounding modifier",
    "add.rz.f32 %f1, %f2, %f3;": "unknown instruction",
    "add.rn.sat.f32 %f1, %f2, %f3;": "unknown instruction",
    "add.rn.ftz.f64 %d2, %d2, %d2;": "unknown instruction",
    "add.cc.u32 %r1, %r2, %r3;": "unknown instruction",
    "cvt.rn.f16x2.f32 %r1, %f1, %f2;": "unknown instruction",
    "cvt.f32.f64 %f1, %d2;": "unknown instruction",
    "setp.lt.f16 %p1, %h1, %h2;": "unknown instruction",
    "add.u32 %r1, %r2;": "2 source operands expected",
    "add.u32 %r1, %r2, %h1;": "%h1 has 16 bits where 32 are needed",
    "add.u64 %r1, %d2, %d3;": "%r1 has 32 bits where 64 are needed",
    "add.u32 %r1, %r2, %r99;": "unknown register %r99",
    "add.u32 %r1, %r2, nowhere;": "unknown register nowhere",
    "mov.u32 %r1, %clock;": "unknown register %clock",
    "mov.f32 %f1, 0d3FF0000000000000;": "does not have 32 bits",
    "ld.global.acquire.u32 %r1, [%d0];": "unknown modifier .acquire",
    "ld.global.u32 %r1, [%r2];": "no address of 64 bits",
    "ld.local.u32 %r1, [%d0];": "unknown modifier .local",
    "ld.global.v8.u32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%d0];": "unknown modifier .v8",
    "ld.global.v4.u64 {%d1,%d2,%d3,%d4}, [%d0];": "at most 16 bytes",
    "ld.param.u64 %d2, [x+4];": "past the end of the parameter",
    "ld.param.u64 %d2, [z];": "a parameter at a fixed offset",
    "st.const.u32 [%d0], %r1;": "a store to .const",
    "bar.sync 1;": "only barrier 0",
    "bar.sync 0, 64;": "only barrier 0",
    "bar.red.popc.u32 %r1, 0, %p1;": "unknown instruction",
    "activemask.b32 %r1;": "not defined by the program",
    "call foo;": "calls are refused",
    "bra $nowhere;": "unknown label",
    "brx.idx %r1, $table;": "unknown instruction",
    ".local .align 4 .b8 depot[16];": "local memory is refused",
    ".reg .b128 %q<2>;": "unknown register type",
    "frobnicate.u32 %r1;": "unknown instruction frobnicate.u32",
    "@%p1 frobnicate.u32 %r1;": "unknown instruction frobnicate.u32",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_known_is_refused_by_line(statement: str) -> None:
    with pytest.raises(PtxError) as caught:
        Module(text_of(f"\n{statement}\n")).kernel("k")
    assert REFUSED[statement] in str(caught.value)
    if not statement.startswith(".reg"):
        assert "PTX line 9: " in str(caught.value)


def test_nvrtc_code_with_an_atomic_or_local_memory_is_refused() -> None:
    source = """extern "C" __global__ void a(float* y) { atomicAdd(y, 1.0f); }
    extern "C" __global__ void b(float* y, int i) {
      float t[8]; for (int k = 0; k < 8; ++k) t[k] = y[k * k]; y[0] = t[i]; }"""
    options = ["-arch=compute_75", "-fmad=false"]
    with pytest.raises(PtxError, match="local memory"):
        Module(nvrtc.compile_ptx(source, options).ptx)
    module = Module(nvrtc.compile_ptx(source.partition("}")[0] + "}", options).ptx)
    with pytest.raises(PtxError, match="atomics are refused"):
        module.kernel("a")


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(KeyError, match="no kernel 'other'"):
        Module(text_of("")).kernel("other")
