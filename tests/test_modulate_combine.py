"""How modulate_backward_combine adds the chunk sums: many at once in flight, one after another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cupyops
import simulated
from cupyops import _modulate
from ptx import LaunchError, memory
from support import DTYPE_NAMES, array, bits

BACKWARD = _modulate._MODULATE_BACKWARD
SOURCE = "modulate_backward.cu"
MULTIPROCESSORS = 132


def gradients(
    b: int, length: int, d: int, name: str, parameter: tuple[int, ...], checks: object = "all"
) -> None:
    """Run on the simulated GPU and hold the bits against NumPy's."""
    rng = np.random.default_rng(b * length + d)
    x, grad = (memory.copy(array(rng.normal(size=(b, length, d)), name)) for _ in range(2))
    scale = memory.copy(array(rng.normal(size=parameter), name))
    # Both gradients in one launch: of scale as `parameter` has it, of shift one row per sample.
    shift = memory.copy(array(rng.normal(size=(b, d)), name))
    inputs = {"x": x, "grad_output": grad, "scale": scale, "shift": shift}
    plan = simulated.plan_of(BACKWARD, inputs, None, True)
    outs = simulated.new_outs(plan)
    simulated.run_checked(plan, inputs, outs, checks=checks)
    want = cupyops.modulate_backward(
        x, grad_output=grad, scale=scale, shift=shift, one_plus_scale=True
    )
    for out, gradient in zip(outs.values(), want, strict=True):
        assert np.array_equal(bits(out), bits(gradient))


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_any_number_of_samples_and_chunks_has_the_bits_of_numpy(name: str) -> None:
    # 1, a few, and more chunk sums than a block holds at once; columns that fill no block.
    for b, length, d in [(1, 130, 9), (3, 65, 40), (33, 7, 17), (150, 3, 3), (2, 4200, 5)]:
        for parameter in [(d,), (b, d)]:
            gradients(b, length, d, name, parameter)


@pytest.mark.parametrize(
    ("shape", "parameter"),
    [((512, 8, 1152), (1152,)), ((1, 32760, 1536), (1, 1536)), ((8, 4096, 1152), (8, 1152))],
)
def test_long_sums_keep_all_multiprocessors_busy(
    shape: tuple[int, ...], parameter: tuple[int, ...]
) -> None:
    x, row = np.broadcast_to(np.float32(0), shape), np.zeros(parameter, np.float32)
    inputs = {"x": x, "grad_output": x, "scale": row, "shift": row}
    combine = simulated.plan_of(BACKWARD, inputs, None, True).launches[-1]
    assert "combine" in combine.kernel.name
    assert combine.grid[0] * combine.grid[1] >= MULTIPROCESSORS
    assert combine.block[:2] == (16, 16)


FAULTS = {
    "no barrier before the sums are added": (
        "= values[u];\n            __syncthreads();",
        "= values[u];",
    ),
    "no barrier before the next are staged": ("__syncthreads();  // before the next values", "//"),
    "a sample's sums run on into the next": ("sample = -0.0;\n                    chunk", "chunk"),
    "the last of the sums at once is left out": (
        "(int)min(length - first, (int64)at_once) : 0",
        "(int)min(length - first, (int64)at_once - 1) : 0",
    ),
    "sums start at +0": ("double sample = -0.0;", "double sample = 0.0;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    simulated.with_fault(monkeypatch, SOURCE, *FAULTS[fault])
    with pytest.raises((LaunchError, AssertionError)):
        every_number_of_sums()


def every_number_of_sums() -> None:
    for b, length in itertools.product((2, 150), (3, 65)):
        gradients(b, length, 17, "float32", (17,))
    test_the_sign_of_zero_survives_a_long_sum()


def test_the_sign_of_zero_survives_a_long_sum() -> None:
    x = memory.copy(np.full((3, 130, 4), -0.0, np.float32))
    one, row = memory.copy(np.ones_like(x)), memory.copy(np.ones((3, 4), np.float32))
    inputs = {"x": x, "grad_output": one, "scale": row}
    plan = simulated.plan_of(BACKWARD, inputs, None, False)
    outs = simulated.new_outs(plan)
    simulated.run_checked(plan, inputs, outs)
    assert np.all(np.signbit(outs["grad_scale"]))
