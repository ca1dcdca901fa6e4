"""How poison travels through instructions, and where it becomes an error."""

from __future__ import annotations

import numpy as np
import pytest

from ptx import Kind, LaunchError
from ptx.handmade import run

LOAD = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0];"  # %r2 is poison, the rest is clean

CLEAN = {
    "and with zero bits": "and.b32 %r5, %r2, 0;",
    "and takes the clean half": "mov.b32 {%h1, %h2}, %r2; mov.b32 %r6, {%h0, %h2};"
    "mov.u16 %h0, 3; mov.b32 %r6, {%h0, %h2}; and.b32 %r5, %r6, 0xffff;",
    "or with one bits": "or.b32 %r5, %r2, -1;",
    "lop3 selects": "lop3.b32 %r5, %r1, %r2, 0, 0xca; mov.u32 %r6, 0;"
    "lop3.b32 %r5, %r6, %r2, %r3, 0xca;",
    "selp selects the clean side": "setp.eq.u32 %p1, %r1, %r1; selp.b32 %r5, %r1, %r2, %p1;",
    "slct selects the clean side": "slct.b32.s32 %r5, %r1, %r2, 1;",
    "shift drops it": "mov.b64 %d2, {%r2, %r1}; shr.u64 %d3, %d2, 32; cvt.u32.u64 %r5, %d3;",
    "funnel shift drops it": "shf.r.wrap.b32 %r5, %r1, %r2, 0;",
    "prmt drops it": "prmt.b32 %r5, %r1, %r2, 0x3210;",
    "bfe drops it": "mov.b64 %d2, {%r2, %r1}; bfe.u64 %d3, %d2, 32, 32; cvt.u32.u64 %r5, %d3;",
    "bfi overwrites it": "bfi.b32 %r5, %r1, %r2, 0, 32;",
    "cvt drops it": "mov.b64 %d2, {%r1, %r2}; cvt.u32.u64 %r5, %d2;",
    "shuffle from a clean lane": "shfl.sync.idx.b32 %r5, %r1, 0, 31, 1;",
    "a predicate that is known": "setp.eq.u32 %p1, %r2, 0; mov.pred %p2, 0;"
    "and.pred %p3, %p1, %p2; selp.u32 %r5, 1, 0, %p3;",
    "shared memory holds it": "st.shared.v2.u32 [s], {%r2, %r1}; ld.shared.u32 %r5, [s+4];",
}
SPOILED = {
    "add": "add.u32 %r5, %r2, %r1;",
    "multiply by zero": "mul.lo.u32 %r5, %r2, 0;",
    "and keeps a bit": "and.b32 %r5, %r2, 1;",
    "or keeps a bit": "or.b32 %r5, %r2, 0x7fffffff;",
    "selp by poison": "setp.eq.u32 %p1, %r2, %r2; selp.b32 %r5, %r1, %r3, %p1;",
    "selp of poison": "setp.ne.u32 %p1, %r1, %r1; selp.b32 %r5, %r1, %r2, %p1;",
    "shift by poison": "shl.b32 %r5, %r1, %r2;",
    "sign of poison": "shr.s32 %r5, %r2, 31;",
    "prmt by poison": "prmt.b32 %r5, %r1, %r3, %r2;",
    "prmt sign": "prmt.b32 %r5, %r1, %r2, 0xfff0;",
    "half of poison": "mov.b32 {%h1, %h2}, %r2; mov.b32 %r5, {%h2, %h2};",
    "negation": "not.b32 %r5, %r2;",
    "float": "mov.b32 %f1, %r2; mul.rn.f32 %f2, %f1, 0f00000000; mov.b32 %r5, %f2;",
    "ballot": "setp.eq.u32 %p1, %r2, 0; vote.sync.ballot.b32 %r5, %p1, 1;",
    "shuffle": "shfl.sync.idx.b32 %r5, %r2, 0, 31, 1;",
    "a register never set": "add.u32 %r5, %r1, %r18;",
    "shared memory": "st.shared.u32 [s], %r2; ld.shared.u32 %r5, [s];",
    "conversion": "cvt.rn.f32.u32 %f1, %r2; mov.b32 %r5, %f1;",
    "minimum": "min.u32 %r5, %r2, 0;",
    "setp": "setp.ge.u32 %p1, %r2, 0; selp.u32 %r5, 1, 0, %p1;",
}
SHARED = ".shared .align 8 .b8 s[16];"
POISONED = {
    "branch": ("setp.eq.u32 %p1, %r2, 0; @%p1 bra $out; $out: st.global.u32 [%d1], %r1;",
               Kind.POISONED_BRANCH),
    "guard": ("setp.eq.u32 %p1, %r2, 0; @!%p1 mov.u32 %r1, 0;", Kind.POISONED_BRANCH),
    "address": ("cvt.u64.u32 %d2, %r2; add.u64 %d3, %d0, %d2; ld.global.u32 %r5, [%d3];",
                Kind.POISONED_ADDRESS),
    "lane": ("shfl.sync.idx.b32 %r5, %r1, %r2, 31, 1;", Kind.POISONED_OPERAND),
}  # fmt: skip


def run_poisoned(body: str) -> np.ndarray:
    x = np.array([11, 22, 33, 44], "u4")
    return run(LOAD + body, x, 1, "u4", poison=np.arange(4) == 1, module_scope=SHARED)


@pytest.mark.parametrize("case", CLEAN)
def test_poison_that_cannot_matter_is_clean(case: str) -> None:
    run_poisoned(CLEAN[case] + "st.global.u32 [%d1], %r5;")


@pytest.mark.parametrize("case", SPOILED)
def test_poison_that_can_matter_spoils_the_result(case: str) -> None:
    with pytest.raises(LaunchError) as caught:
        run_poisoned(SPOILED[case] + "st.global.u32 [%d1], %r5;")
    assert caught.value.kind == Kind.POISON_STORED


@pytest.mark.parametrize("case", POISONED)
def test_poison_may_not_steer(case: str) -> None:
    body, kind = POISONED[case]
    with pytest.raises(LaunchError) as caught:
        run_poisoned(body)
    assert caught.value.kind == kind
