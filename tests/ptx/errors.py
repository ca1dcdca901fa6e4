"""Failures of a launch, put into words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .abi import NOBODY, Failure, Kind
from .memory import Memory
from .module import Kernel


class LaunchError(RuntimeError):
    """A launch was impossible or a check failed; ``kind`` says which."""

    kind = Kind.FINE


def _index(linear: int, extents: Sequence[int]) -> tuple[int, int, int]:
    x, y = extents[0], extents[1]
    return linear % x, linear // x % y, linear // x // y


def _place(failure: Failure, memory: Memory) -> str:
    if failure.shared:
        return f"shared memory offset {failure.address}"
    return f"{failure.address:#x}, {memory.describe(failure.address)}"


def _access(failure: Failure, memory: Memory) -> str:
    verb = "store" if failure.write else "load"
    return f"{verb} of {failure.bytes} bytes at {_place(failure, memory)}"


def _race(failure: Failure, kernel: Kernel, block: Sequence[int], memory: Memory) -> str:
    verb = "writes" if failure.write else "reads"
    other = f"thread {_index(failure.other_thread, block)}"
    if failure.kind == Kind.RACE_BETWEEN_BLOCKS:
        other = "an earlier block"
        if failure.other_thread != NOBODY:
            other = f"another block (linear index {failure.other_block})"
    return (
        f"{verb} {_place(failure, memory)}, which {other} touched with nothing between to order it"
    )


Words = Callable[[Failure, Kernel, Sequence[int], Memory], str]

MESSAGES: dict[Kind, tuple[str, Words]] = {
    Kind.OUT_OF_BOUNDS: ("out of bounds", lambda f, k, b, m: _access(f, m)),
    Kind.MISALIGNED: ("misaligned", lambda f, k, b, m: _access(f, m)),
    Kind.READ_ONLY: ("write to read-only memory", lambda f, k, b, m: _access(f, m)),
    Kind.SHARED_BOUNDS: ("out of bounds of shared memory", lambda f, k, b, m: _access(f, m)),
    Kind.POISON_STORED: ("poison used", lambda f, k, b, m: f"in a {_access(f, m)}"),
    Kind.POISONED_BRANCH: ("poison used", lambda f, k, b, m: "as a branch predicate"),
    Kind.POISONED_ADDRESS: ("poison used", lambda f, k, b, m: "in an address"),
    Kind.POISONED_OPERAND: ("poison used", lambda f, k, b, m: "to steer a warp operation"),
    Kind.RACE_IN_BLOCK: ("race between threads", _race),
    Kind.RACE_BETWEEN_BLOCKS: ("race between blocks", _race),
    Kind.BARRIER_DIVERGED: (
        "divergent barrier",
        lambda f, k, b, m: (
            f"{f.arrived} of {f.expected} threads are at this one, while thread "
            f"{_index(f.other_thread, b)} waits at {k.where(f.other_site)}"
        ),
    ),
    Kind.WARP_STUCK: (
        "warp operation not reached by all of its mask",
        lambda f, k, b, m: (
            f"mask {f.mask:#010x}: {f.arrived} of {f.expected} lanes arrived, "
            f"{f.elsewhere} threads wait at a barrier"
        ),
    ),
    Kind.WARP_MISMATCH: (
        "different warp operations under one mask",
        lambda f, k, b, m: f"another lane is at {k.where(f.other_site)}",
    ),
    Kind.WARP_NOT_MEMBER: (
        "warp operation by a lane outside its mask",
        lambda f, k, b, m: f"mask {f.mask:#010x}",
    ),
    Kind.TRAPPED: ("trap", lambda f, k, b, m: "the kernel stopped itself"),
    Kind.NO_MEMORY: ("out of host memory", lambda f, k, b, m: ""),
}


def explain(
    failure: Any, kernel: Kernel, block: Sequence[int], grid: Sequence[int], memory: Memory
) -> LaunchError:
    """Make the exception for a failure that the runtime reported."""
    kind = Kind(failure.kind)
    title, words = MESSAGES[kind]
    where = kernel.where(failure.site) if failure.site else "before the first instruction"
    error = LaunchError(
        f"{title}: {words(failure, kernel, block, memory)}\n"
        f"  kernel {kernel.entry.name}, block {_index(failure.block, grid)}, "
        f"thread {_index(failure.thread, block)}\n  {where}"
    )
    error.kind = kind
    return error
