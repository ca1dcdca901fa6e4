"""One Mamba-2 SSD chunk, forward and backward through exp_segsum, against the recurrence.

State-space duality (Dao and Gu, arXiv:2405.21060, section 6): the recurrence

    h_t = exp(a_t) h_{t-1} + B_t x_t^T,    y_t = C_t^T h_t

equals y = (C B^T * L) x with L = exp_segsum(a), which is matrix products. The chunk starts from an
empty state (h = 0), so a_0 decays nothing: L does not contain it, and its gradient is exactly 0.
A log decay of -inf empties the state; packed documents are separated by it.

Prints the errors of y and of the gradients of x, a, B and C against the recurrence and its adjoint,
which run in float64 one step at a time, without and with resets. On the GPU through CuPy where
there is one, else on NumPy:

    python docs/examples/ssd_chunk.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyops

BATCH, HEADS, T, N, P = 2, 4, 64, 16, 32  # N: state size, P: head dimension
RESETS = [0, 20, 21, 50]  # first tokens of documents; the second document is one token long
TOLERANCES = {"float64": 1e-14, "float32": 5e-6}  # of the largest magnitude: about 45 eps
NAMES = ["y", "grad_x", "grad_a", "grad_B", "grad_C"]


def array_library() -> Any:
    """CuPy if it is installed and sees a GPU, else NumPy."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else np
    except Exception:  # not installed, or no driver: CuPy raises several kinds of error
        return np


def transpose(matrices: Any) -> Any:
    return matrices.swapaxes(-1, -2)


def chunk(x: Any, a: Any, b: Any, c: Any, grad_y: Any) -> list[Any]:
    """y and the gradients of x (..., T, P), a (..., T), b and c (..., T, N)."""
    decay = cupyops.exp_segsum(a)  # (..., T, T): L
    scores = c @ transpose(b)
    attention = scores * decay
    y = attention @ x

    grad_attention = grad_y @ transpose(x)
    grad_scores = grad_attention * decay
    # Entries above the diagonal of grad_output are not zero here; they are never used.
    grad_a = cupyops.exp_segsum_backward(decay, grad_output=grad_attention * scores)
    grad_x = transpose(attention) @ grad_y
    return [y, grad_x, grad_a, transpose(grad_scores) @ c, grad_scores @ b]


def recurrence(x: Any, a: Any, b: Any, c: Any, grad_y: Any) -> list[Any]:
    """The same, one time step after the other; backward in time for the gradients."""
    states = np.zeros((BATCH, HEADS, T + 1, N, P))  # states[t + 1] = h_t
    y, grad_x, grad_a, grad_b, grad_c = (np.zeros_like(v) for v in (x, x, a, b, c))
    outer = "bhn,bhp->bhnp"
    for t in range(T):
        kept = np.exp(a[:, :, t, None, None]) * states[:, :, t]
        states[:, :, t + 1] = kept + np.einsum(outer, b[:, :, t], x[:, :, t])
        y[:, :, t] = np.einsum("bhn,bhnp->bhp", c[:, :, t], states[:, :, t + 1])
    grad_h = np.zeros((BATCH, HEADS, N, P))  # of the loss with respect to h_t
    for t in reversed(range(T)):
        grad_h += np.einsum(outer, c[:, :, t], grad_y[:, :, t])
        grad_c[:, :, t] = np.einsum("bhnp,bhp->bhn", states[:, :, t + 1], grad_y[:, :, t])
        grad_b[:, :, t] = np.einsum("bhnp,bhp->bhn", grad_h, x[:, :, t])
        grad_x[:, :, t] = np.einsum("bhnp,bhn->bhp", grad_h, b[:, :, t])
        grad_h *= np.exp(a[:, :, t, None, None])  # now with respect to h_{t-1}
        grad_a[:, :, t] = np.einsum("bhnp,bhnp->bh", grad_h, states[:, :, t])
    return [y, grad_x, grad_a, grad_b, grad_c]


def check(xp: Any, resets: list[int], dtype: str, inputs: list[np.ndarray]) -> None:
    x, a, b, c, grad_y = (v.astype(dtype) for v in inputs)
    a[..., resets] = -np.inf
    device = [xp.asarray(v) for v in (x, a, b, c, grad_y)]
    got = [v if xp is np else v.get() for v in chunk(*device)]
    want = recurrence(*(v.astype("float64") for v in (x, a, b, c, grad_y)))
    errors = [abs(g - w).max() / abs(w).max() for g, w in zip(got, want, strict=True)]
    print(f"{len(resets):6} {dtype:>8}", *(f"{error:9.1e}" for error in errors))
    for name, error in zip(NAMES, errors, strict=True):
        if not error < TOLERANCES[dtype]:  # also when it is NaN
            raise SystemExit(f"{name}: error {error:.1e} is not below {TOLERANCES[dtype]:.0e}")
    grad_a = got[2]
    if grad_a[..., [0, *resets]].any():
        raise SystemExit("a log decay that acts on an empty state, or empties it, has a gradient")


def main() -> None:
    xp = array_library()
    rng = np.random.default_rng(0)
    tokens = (BATCH, HEADS, T)
    x, b, c, grad_y = (rng.standard_normal((*tokens, width)) for width in (P, N, N, P))
    a = -rng.exponential(0.3, tokens)
    print(f"Largest error, relative to the largest magnitude; arrays of {xp.__name__}.")
    print("resets    dtype", *(f"{name:>9}" for name in NAMES))
    for resets in ([], RESETS):
        for dtype in TOLERANCES:
            check(xp, resets, dtype, [x, a, b, c, grad_y])
    print("The chunk agrees with the recurrence.")


if __name__ == "__main__":
    main()
