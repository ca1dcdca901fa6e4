"""Operators with arrays on a real GPU that fit together, for the tests marked `gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyops
from libraries import Cupy
from support import (
    assert_same_bits,
    forward_part,
    gradient_pair,
    modulation_problem,
    poisoned,
    positional,
    sequence,
)

OPERATORS = ["modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"]
WITH_WORKSPACE = ["modulate_backward", "exp_segsum_backward"]
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def spinner(cupy: Any) -> Any:
    """``spin(cycles)`` keeps the current stream busy for so many clock cycles."""
    kernel = cupy.RawKernel(SPIN, "spin")
    return lambda cycles: kernel((1,), (1,), (np.int64(cycles),))


def problem(name: str, dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Random inputs; both backward operators need a workspace at these sizes."""
    rng = np.random.default_rng(seed)
    if name == "exp_segsum":
        return {"x": sequence(rng, (2, 300), dtype, "decay")}
    if name == "exp_segsum_backward":
        y, grad_output = gradient_pair(rng, (2, 1100, 1100), dtype)
        return {"y": y, "grad_output": grad_output}
    both = modulation_problem(rng, (3, 200, 72), dtype, "B,D", "D")
    return both if name == "modulate_backward" else forward_part(both)


class Call:
    """An operator with arrays on the GPU that fit together."""

    def __init__(self, gpu: Cupy, name: str, dtype: str = "float32", seed: int = 0) -> None:
        self.gpu, self.name = gpu, name
        self.host = problem(name, dtype, seed)
        self.arrays = {key: gpu.put(values) for key, values in self.host.items()}

    def eager(self, **more: Any) -> Any:
        first, rest = positional(self.arrays | more)
        return getattr(cupyops, self.name)(first, **rest)

    def plan(self) -> cupyops.Plan:
        first, rest = positional(self.arrays)
        return getattr(cupyops, f"plan_{self.name}")(first, **rest)

    def run(self, plan: cupyops.Plan, **more: Any) -> Any:
        first, rest = positional(self.arrays | more)
        return plan.run(first, **rest)

    def memory(self, plan: cupyops.Plan) -> dict[str, Any]:
        """All that a run writes: outputs full of NaN, and a workspace."""
        made = [self.gpu.put(poisoned(spec.shape, spec.dtype)) for spec in plan.outputs]
        out = cupyops.ModulateGrads(*made) if len(made) > 1 else made[0]
        return {"out": out, "workspace": self.gpu.cupy.empty(plan.workspace_size, np.uint8)}


def host(result: Any, stream: Any = None) -> list[np.ndarray]:
    """The arrays of a result, copied in the order of `stream` (the current one if None)."""
    parts = result if isinstance(result, tuple) else (result,)
    return [part.get(stream=stream) for part in parts]


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)
