"""Small kernels written as PTX by hand, for tests of single instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory
from .executor import Executor
from .memory import Array, Memory
from .module import Module

HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %p<9>; .reg .b16 %h<19>; .reg .b32 %r<19>; .reg .b64 %d<19>; .reg .f32 %f<9>;"
)


def text_of(body: str, module_scope: str = "") -> str:
    """A kernel with its thread index in %r0, the input's address in %d0, the output's in %d1."""
    return f"""{HEADER}{module_scope}
.visible .entry k(.param .u64 x, .param .u64 y)
{{ {REGISTERS}
ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y]; mov.u32 %r0, %tid.x;
{body}
ret; }}"""


def run(
    body: str,
    x: Any,
    shape: Any,
    dtype: Any,
    *,
    poison: Any = False,
    checks: Any = "all",
    threads: int = 1,
    module_scope: str = "",
) -> Array:
    """Run a kernel on one input and one output array; returns the output."""
    mem = Memory()
    given = memory.copy(np.asarray(x))
    out = memory.empty(shape, dtype)
    args = [
        mem.register(given, "x", readonly=True, poison=poison),
        mem.register(out, "y", poison=True),
    ]
    module = Module(text_of(body, module_scope))
    Executor(mem, checks=checks).launch(module, "k", grid=(1,), block=(threads,), args=args)
    if checks:
        mem.check_written("y")
    return out
