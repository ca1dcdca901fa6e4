"""Run a kernel of a PTX module on the CPU, plainly or under checks.

The plain mode runs at full speed on any host memory. With checks every access goes through the
registered memory: see ``Executor``.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from . import abi, build
from .arguments import pack
from .errors import LaunchError, explain
from .memory import LIVE, Array, Memory, Segment
from .module import Kernel, Module

CHECKS = {
    "memcheck": 0,  # comes with every checked launch
    "initcheck": abi.Check.INIT,
    "racecheck": abi.Check.RACE,
    "traffic": abi.Check.TRAFFIC,
}
ALL_CHECKS = tuple(CHECKS)
ORDERS = ("forward", "reversed", "shuffled")

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
DEFAULT_SHARED = 48 * 1024
CONSTANTS = "module variables"

# The runtime keeps the running launch in a global.
_lock = threading.Lock()


@dataclass
class Traffic:
    """32-byte sectors: distinct within a warp instruction, and distinct within a block."""

    read_requests: int = 0
    write_requests: int = 0
    read_sectors: int = 0
    write_sectors: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f) + getattr(other, f) for f in vars(self)))


@dataclass
class Report:
    """What a launch did; counts are zero in plain mode.

    ``buffers`` holds the sectors of each named buffer ("traffic"). ``shared_wavefronts`` minus
    ``shared_minimum`` are the extra passes that bank conflicts cost.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    checks: tuple[str, ...]
    seconds: float
    instructions: int = 0
    buffers: dict[str, Traffic] = field(default_factory=dict)
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_minimum: int = 0

    @property
    def total(self) -> Traffic:
        return sum(self.buffers.values(), Traffic())

    @property
    def bank_conflicts(self) -> int:
        return self.shared_wavefronts - self.shared_minimum


class Executor:
    """Launches kernels.

    Parameters
    ----------
    memory : Memory, optional
        What checked launches may touch; a fresh, empty one by default.
    checks : collection of str, or "all"
        Any of ``ALL_CHECKS``; none is the plain mode. Any check includes memcheck.
    order : {"forward", "reversed", "shuffled"}
        In which order blocks, and the threads between two barriers, run.
    seed : int
        For the shuffled order.
    """

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        checks: Collection[str] | str = (),
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        names = ALL_CHECKS if checks == "all" else tuple(checks)
        if (isinstance(checks, str) and checks != "all") or set(names) - set(ALL_CHECKS):
            raise ValueError(f"checks is {checks!r}; expected 'all' or some of {ALL_CHECKS}")
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; expected one of {ORDERS}")
        self.memory = memory if memory is not None else Memory()
        self.checks = names
        self.order = order
        self.seed = seed

    def launch(
        self,
        module: Module,
        kernel_name: str,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        max_dynamic_shared_bytes: int | None = None,
    ) -> Report:
        """Run one kernel to its end.

        ``args`` are ``Pointer``s, typed NumPy scalars and bytes (structs). A block has at most
        48 KiB of shared memory unless *max_dynamic_shared_bytes* raises the dynamic part, as the
        attribute of that name does on a GPU. Raises LaunchError where a check fails or the
        launch is impossible, ArgumentError where an argument does not fit its parameter.
        """
        kernel = module.kernel(kernel_name)
        sizes = _check_sizes(kernel, grid, block)
        _check_shared(kernel, shared_bytes, max_dynamic_shared_bytes)
        request = self._request(kernel, sizes, shared_bytes)
        params = pack(kernel.entry, args)
        # ctypes keeps no reference to what a pointer field points to; these locals do.
        keep = [params, *self._orders(request, sizes), *self._tables(request, kernel)]
        request.params = params
        image = kernel.image("checked" if self.checks else "plain")
        request.image = ctypes.pointer(image)
        with _lock:
            start = time.perf_counter()
            build.runtime().ptx_run(ctypes.byref(request))
            seconds = time.perf_counter() - start
        del keep
        if not self.checks:
            self.memory.forget()
        if request.failure.kind:
            raise explain(request.failure, kernel, sizes[1], sizes[0], self.memory)
        return self._report(request, kernel, sizes, seconds)

    # ---- preparing ------------------------------------------------------------------------------

    def _request(
        self, kernel: Kernel, sizes: tuple[tuple[int, ...], tuple[int, ...]], shared_bytes: int
    ) -> abi.Request:
        request = abi.Request()
        request.grid[:], request.block[:] = sizes
        request.static_shared = _static_shared(kernel)
        request.dynamic_shared = shared_bytes
        request.checks = sum(CHECKS[name] for name in self.checks)
        return request

    def _orders(
        self, request: abi.Request, sizes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> list[Array]:
        if self.order == "forward":
            return []
        blocks = np.arange(prod(sizes[0]), dtype=np.uint64)
        threads = np.arange(prod(sizes[1]), dtype=np.uint32)
        if self.order == "reversed":
            orders: list[Array] = [blocks[::-1].copy(), threads[::-1].copy()]
        else:
            random = np.random.default_rng(self.seed)
            orders = [random.permutation(blocks), random.permutation(threads)]
        request.block_order, request.thread_order = (order.ctypes.data for order in orders)
        return orders

    def _tables(self, request: abi.Request, kernel: Kernel) -> list[Any]:
        """Hand the registered memory, and the module's own tables, to the runtime."""
        if not self.checks:
            return []
        owner = len(self.memory.buffers)
        segments = [*self.memory.segments, *_variable_segments(kernel, owner)]
        segments.sort(key=lambda segment: segment.low)
        table = (abi.Segment * len(segments))()
        for entry, segment in zip(table, segments, strict=True):
            entry.low, entry.high, entry.host = segment.low, segment.high, segment.host
            entry.state = segment.state.ctypes.data
            entry.owner = segment.owner.ctypes.data
            entry.granule = segment.granule
        counters = (abi.Counters * (owner + 1))()
        request.segments = ctypes.cast(table, ctypes.POINTER(abi.Segment))
        request.segment_count = len(segments)
        request.counters = ctypes.cast(counters, ctypes.POINTER(abi.Counters))
        request.buffer_count = owner + 1
        return [segments, table, counters]

    def _report(
        self,
        request: abi.Request,
        kernel: Kernel,
        sizes: tuple[tuple[int, ...], tuple[int, ...]],
        seconds: float,
    ) -> Report:
        report = Report(
            kernel.entry.name,
            sizes[0],  # type: ignore[arg-type]
            sizes[1],  # type: ignore[arg-type]
            self.checks,
            seconds,
            request.instructions,
            {},
            request.shared_requests,
            request.shared_wavefronts,
            request.shared_minimum,
        )
        if "traffic" in self.checks:
            names = [buffer.name for buffer in self.memory.buffers] + [CONSTANTS]
            for index, name in enumerate(names):
                counts = request.counters[index]
                traffic = Traffic(*(getattr(counts, f) for f in abi.COUNTERS))
                if name != CONSTANTS or traffic != Traffic():
                    report.buffers[name] = traffic
        return report


def _static_shared(kernel: Kernel) -> int:
    """Bytes of static shared memory, up to where the dynamic part starts."""
    align = kernel.translation.dynamic_shared_align
    return -(-kernel.translation.static_shared // align) * align


def _variable_segments(kernel: Kernel, owner: int) -> list[Segment]:
    image = kernel.image("checked")
    made = []
    for index in range(image.variable_count):
        variable = image.variables[index]
        state = np.full(variable.bytes, LIVE, np.uint8)
        owners = np.full(variable.bytes, owner, np.uint16)
        low = variable.address
        made.append(Segment(low, low + variable.bytes, low, 1, state, owners))
    return made


def _check_sizes(
    kernel: Kernel, grid: Sequence[int], block: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pad grid and block to three axes and hold them against the limits of CUDA."""
    found = []
    for what, given, limits in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        size = (*map(int, given), 1, 1, 1)[:3]
        if len(given) not in (1, 2, 3) or any(
            not 1 <= n <= limit for n, limit in zip(size, limits, strict=True)
        ):
            raise LaunchError(
                f"{kernel.entry.name}: {what} {tuple(given)}; the limits are {limits}"
            )
        found.append(size)
    if prod(found[1]) > MAX_THREADS:
        raise LaunchError(f"{kernel.entry.name}: block {found[1]} has over {MAX_THREADS} threads")
    bound = kernel.entry.directives.get("maxntid") or kernel.entry.directives.get("reqntid")
    if bound and prod(found[1]) > prod(bound):
        raise LaunchError(
            f"{kernel.entry.name}: block {found[1]} exceeds its launch bounds {bound}"
        )
    return found[0], found[1]


def _check_shared(kernel: Kernel, dynamic: int, raised: int | None) -> None:
    static = _static_shared(kernel)
    limit = kernel.module.max_shared()
    allowed = DEFAULT_SHARED if raised is None else max(DEFAULT_SHARED, static + raised)
    if allowed > limit:
        raise LaunchError(
            f"{kernel.entry.name}: {static} bytes of static and up to {raised} of dynamic shared "
            f"memory; {kernel.module.parsed.target} has {limit}"
        )
    if dynamic < 0 or static + dynamic > allowed:
        raise LaunchError(
            f"{kernel.entry.name}: {static} static and {dynamic} dynamic bytes of shared memory; "
            f"{allowed} allowed"
        )
