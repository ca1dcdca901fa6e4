"""Backward step of adaLN modulation at the size of DiT-XL/2, checked against float64.

Runs on the GPU through CuPy where there is one, else on NumPy:

    python docs/examples/adaln_backward.py
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import cupyops

SHAPES = [(2, 256, 1152), (8, 4096, 1152)]  # (B, L, D): DiT-XL/2 at 256 x 256 pixels; a video
TOLERANCE = 1e-5  # of the sum of magnitudes; float32 rounds each step to 6e-8


def array_library() -> Any:
    """CuPy if it is installed and sees a GPU, else NumPy."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else np
    except Exception:  # not installed, or no driver: CuPy raises several kinds of error
        return np


def to_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def seconds(xp: Any, function: Any, repeats: int = 5) -> float:
    """Median time of a call, after one that compiles and warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def max_error(
    x: np.ndarray, grad_output: np.ndarray, scale: np.ndarray, grads: cupyops.ModulateGrads
) -> float:
    """Largest error against the formula in float64, relative to the magnitudes that were added."""
    worst = 0.0
    for b in range(len(x)):  # a sample at a time: float64 copies of everything are large
        x64, g64, scale64 = (a.astype(np.float64) for a in (x[b], grad_output[b], scale[b]))
        factor = 1 + scale64
        for got, want, magnitude in [
            (grads.grad_input[b], g64 * factor, abs(g64 * factor)),
            (grads.grad_scale[b], (g64 * x64).sum(0), abs(g64 * x64).sum(0)),
            (grads.grad_shift[b], g64.sum(0), abs(g64).sum(0)),
        ]:
            relative = abs(got - want) / np.maximum(magnitude, np.finfo(np.float32).tiny)
            worst = max(worst, float(np.max(relative)))
    return worst


def main() -> None:
    xp = array_library()
    rng = np.random.default_rng(0)
    print(f"{'shape (B, L, D)':>18} {'dtype':>8} {'backend':>8} {'time':>11} {'max error':>10}")
    for shape in SHAPES:
        b, _, d = shape
        x, grad_output = (rng.standard_normal(shape, np.float32) for _ in range(2))
        scale, shift = (rng.standard_normal((b, d), np.float32) for _ in range(2))
        arrays = [xp.asarray(a) for a in (x, grad_output, scale, shift)]

        def step(arrays: list[Any] = arrays) -> cupyops.ModulateGrads:
            x, grad_output, scale, shift = arrays
            return cupyops.modulate_backward(
                x, grad_output=grad_output, scale=scale, shift=shift, one_plus_scale=True
            )

        grads = cupyops.ModulateGrads(*(to_numpy(grad) for grad in step()))
        error = max_error(x, grad_output, scale, grads)
        elapsed = seconds(xp, step)
        print(
            f"{shape!s:>18} {x.dtype!s:>8} {xp.__name__:>8} {elapsed * 1e3:8.2f} ms {error:10.1e}"
        )
        if not error < TOLERANCE:
            raise SystemExit(f"error {error:.1e} is not below {TOLERANCE:.0e}")
    print("All gradients agree with float64.")


if __name__ == "__main__":
    main()
