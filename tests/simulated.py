"""A GPU that is not there: arrays in host memory, kernels run from their PTX on the CPU.

`GpuArray` stands for `cupy.ndarray`, `SimulatedExecutor` for the executor of CuPy. The plans, their
launches, arguments and workspaces, and the kernels are those that a GPU would get.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from cupyops import _arrays, _kernels, _launch, _plan
from cupyops._arrays import ArraySpec
from ptx import Executor, Memory, Module, Report, memory, nvrtc

LIBRARY = "simulated"
TARGETS = ("compute_75", "compute_90")


class GpuArray:
    """Values in memory that only kernels touch; made with `put`, read with `get`."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape, self.dtype, self.strides = values.shape, values.dtype, values.strides


GpuArray.__module__ = LIBRARY


def options(target: str) -> list[str]:
    """What CuPy hands to NVRTC: our options, the architecture, and -ftz=true last."""
    return [*_kernels.OPTIONS, f"-arch={target}", "-ftz=true"]


@cache
def instances(source: str) -> tuple[str, ...]:
    """Every kernel of a source file that a plan may ask for."""
    types, forms = tuple(_launch.C_TYPES.values()), (False, True)
    pairs = [(x, p) for x in types for p in types]
    computes = [(c, p) for c, p in pairs if c in ("f32", "f64") and (c, p) != ("f32", "f64")]
    make = _launch.instance
    return {
        "modulate.cu": tuple(make("modulate", *pair, v) for pair in pairs for v in forms),
        "modulate_backward.cu": (
            *(make("modulate_backward_rows", *pair, v) for pair in pairs for v in forms),
            *(make("modulate_backward_combine", *pair) for pair in computes),
        ),
        "exp_segsum.cu": tuple(make("exp_segsum", x, v) for x in types for v in forms),
        "exp_segsum_backward.cu": (
            *(make("exp_segsum_backward_rows", x, v) for x in types for v in forms),
            *(make("exp_segsum_backward_combine", x) for x in types),
        ),
    }[source]


SOURCES = ("modulate.cu", "modulate_backward.cu", "exp_segsum.cu", "exp_segsum_backward.cu")


@cache
def module(source: str, target: str) -> Module:
    return _module(_kernels.source_text(source), source, target)


def _module(text: str, source: str, target: str) -> Module:
    made = nvrtc.compile_ptx(text, options(target), instances(source), filename=source)
    assert not made.log, made.log
    return Module(made.ptx, made.lowered)


def with_fault(monkeypatch: Any, source: str, sound: str, faulty: str) -> None:
    """Plant a fault: exchange one place of a kernel's source for the length of a test."""
    text = _kernels.source_text(source)
    assert text.count(sound) == 1, sound
    made = _module(text.replace(sound, faulty), source, TARGETS[0])
    monkeypatch.setitem(globals(), "module", lambda source, target: made)


class SimulatedExecutor:
    """Launches on the CPU, at full speed or with checks on every access."""

    def __init__(self, target: str = TARGETS[0], order: str = "forward", seed: int = 0) -> None:
        self.target, self.order, self.seed = target, order, seed
        self.launched: list[_launch.Launch] = []

    def prepare(self, launches: tuple[_launch.Launch, ...], device: str) -> None:
        for kernel, _ in _kernels.kernels_of(launches):
            assert kernel.name in instances(kernel.source), kernel

    def check_stream(self, function: str, stream: Any, device: str) -> None:
        assert stream is None

    def context(self, device: str, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def launch(
        self,
        launches: tuple[_launch.Launch, ...],
        addresses: Mapping[str, int],
        workspace: int,
        device: str,
        stream: Any,
    ) -> None:
        self.launched += [launch.for_addresses(addresses) for launch in launches]
        executor = Executor(Memory(), order=self.order, seed=self.seed)
        launch_all(executor, launches, addresses, workspace, self.target)


def _spec(array: GpuArray) -> ArraySpec:
    return ArraySpec._make((array.shape, array.dtype, array.strides, LIBRARY, "simulated:0"))


def _empty(spec: ArraySpec) -> GpuArray:
    values = memory.empty(spec.shape, spec.dtype)
    values.view(np.uint8)[...] = 0xFF  # NaN in every type
    return GpuArray(values)


def install(monkeypatch: Any, executor: SimulatedExecutor) -> None:
    """Make `GpuArray` a supported array for the length of a test."""
    library = _arrays._Library(
        types=frozenset({(LIBRARY, "GpuArray")}),
        spec=_spec,
        empty=_empty,
        address=lambda array: array.values.ctypes.data,
        writable=lambda array: True,
        aligned=True,
        device=lambda device: "simulated:0",
    )
    monkeypatch.setitem(_arrays._LIBRARIES, LIBRARY, library)
    monkeypatch.setitem(_plan.EXECUTORS, LIBRARY, executor)


def run_checked(
    plan: _plan.Plan,
    inputs: Mapping[str, np.ndarray],
    outs: Mapping[str, np.ndarray],
    *,
    target: str = TARGETS[0],
    checks: Any = "all",
    order: str = "forward",
    seed: int = 0,
    unread: Mapping[str, np.ndarray] | None = None,
    workspace_offset: int = 0,
) -> list[Report]:
    """Run the launches of a plan with every access checked.

    Outputs and workspace start as never written, inputs are read-only, and elements that the
    masks in `unread` name must not influence anything. Every element of `outs` must be written.
    """
    mem = Memory()
    addresses: dict[str, int] = {}
    for name, array in inputs.items():
        addresses[name] = mem.register(
            array, name, readonly=True, poison=(unread or {}).get(name, False)
        )
    for name, array in outs.items():
        addresses[name] = mem.register(array, name, poison=True)
    workspace = memory.empty(plan.workspace_size, np.uint8, offset=workspace_offset)
    base = mem.register(workspace, "workspace", poison=True)
    executor = Executor(mem, checks=checks, order=order, seed=seed)
    reports = launch_all(executor, plan.launches, addresses, base, target)
    mem.check_written(*outs)
    return reports


def launch_all(
    executor: Executor,
    launches: tuple[_launch.Launch, ...],
    addresses: Mapping[str, int],
    workspace: int,
    target: str,
) -> list[Report]:
    """Launch in order, in the forms that the addresses allow."""
    reports = []
    for planned in launches:
        launch = planned.for_addresses(addresses)
        report = executor.launch(
            module(launch.kernel.source, target),
            launch.kernel.name,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            args=launch.bind(addresses, workspace),
        )
        # The report has the compiler's name.
        reports.append(replace(report, kernel=launch.kernel.name))
    return reports


def specs_of(
    arrays: Mapping[str, np.ndarray | ArraySpec | None], names: tuple[str, ...]
) -> tuple[ArraySpec | None, ...]:
    given = (arrays.get(name) for name in names)
    return tuple(a if a is None or isinstance(a, ArraySpec) else _spec(GpuArray(a)) for a in given)


def plan_of(
    operator: _plan.Operator,
    inputs: Mapping[str, np.ndarray | ArraySpec | None],
    outs: Mapping[str, np.ndarray | ArraySpec | None] | None = None,
    *options: Any,
) -> _plan.Plan:
    """A plan for the simulated GPU, from arrays or from metadata alone."""
    return operator.build(
        operator,
        specs_of(inputs, operator.inputs),
        specs_of(outs or {}, operator.outputs),
        *options,
    )


def new_outs(plan: _plan.Plan) -> dict[str, np.ndarray]:
    """Device-aligned arrays for all outputs of a plan."""
    pairs = zip(plan.operator.outputs, plan.outputs, strict=True)
    return {name: _empty(spec).values for name, spec in pairs if spec is not None}
