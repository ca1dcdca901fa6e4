"""The operators as one would first write them in NumPy or CuPy, in the dtype of the arrays.

What `bench` compares with. Each takes the array module, the inputs by name, and None or arrays for
the results; scale and shift are (B, D), and modulation has ``1 + scale``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Results = tuple[Any, ...]


def modulate(xp: Any, a: Mapping[str, Any], outs: Results | None) -> Results:
    factor, shift = 1 + a["scale"][:, None], a["shift"][:, None]
    if outs is None:
        return (a["x"] * factor + shift,)
    xp.multiply(a["x"], factor, out=outs[0])
    xp.add(outs[0], shift, out=outs[0])
    return outs


def modulate_backward(xp: Any, a: Mapping[str, Any], outs: Results | None) -> Results:
    grad, factor = a["grad_output"], 1 + a["scale"][:, None]
    if outs is None:
        return grad * factor, (grad * a["x"]).sum(axis=1), grad.sum(axis=1)
    xp.multiply(grad, factor, out=outs[0])
    (grad * a["x"]).sum(axis=1, out=outs[1])
    grad.sum(axis=1, out=outs[2])
    return outs


def exp_segsum(xp: Any, a: Mapping[str, Any], outs: Results | None) -> Results:
    x = a["x"]
    t, zero = x.shape[-1], x.dtype.type(0)
    terms = xp.where(xp.tri(t, k=-1, dtype=bool), x[..., None], zero)
    sums = xp.where(xp.tri(t, dtype=bool), terms.cumsum(axis=-2), x.dtype.type(-float("inf")))
    if outs is None:
        return (xp.exp(sums),)
    xp.exp(sums, out=outs[0])
    return outs


def exp_segsum_backward(xp: Any, a: Mapping[str, Any], outs: Results | None) -> Results:
    products = xp.tril(a["grad_output"] * a["y"])
    columns = products[..., ::-1, :].cumsum(axis=-2)[..., ::-1, :]
    kept = xp.tril(columns, -1)
    if outs is None:
        return (kept.sum(axis=-1),)
    kept.sum(axis=-1, out=outs[0])
    return outs


NAIVE: dict[str, Callable[[Any, Mapping[str, Any], Results | None], Results]] = {
    "modulate": modulate,
    "modulate_backward": modulate_backward,
    "exp_segsum": exp_segsum,
    "exp_segsum_backward": exp_segsum_backward,
}
