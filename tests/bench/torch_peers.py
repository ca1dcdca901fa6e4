"""torch on the CPU: eager operations, its own backward pass, and compiled formulas.

Tensors share the memory of the NumPy arrays. Of 16-bit types torch rounds every intermediate
result to the storage type, except inside an operation (and where the compiler fuses several).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bench.cases import THREADS, Absent, Work
from bench.torch_formulas import TORCH, segment_sums
from cupyops.cli.reference import Floats

torch.set_num_threads(THREADS)

Run = Callable[[], tuple[Any, ...]]
BRAIN = np.dtype(ml_dtypes.bfloat16)


def tensor(array: Floats) -> torch.Tensor:
    """On the memory of the array; torch knows no bfloat16 of NumPy's, so its bits go across."""
    if array.dtype == BRAIN:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def fetch(result: torch.Tensor) -> Floats:
    if result.dtype == torch.bfloat16:
        bits: Floats = result.detach().contiguous().view(torch.int16).numpy()
        return bits.view(BRAIN)
    values: Floats = result.detach().numpy()
    return values


def tensors(work: Work) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...] | None]:
    outs = None if work.outs is None else tuple(tensor(out) for out in work.outs)
    return {name: tensor(array) for name, array in work.arrays.items()}, outs


# -- eager --------------------------------------------------------------------------------------


def _modulate(outs: Any, x: Any, scale: Any, shift: Any) -> Any:
    torch.mul(x, 1 + scale[:, None], out=outs[0]).add_(shift[:, None])
    return outs


def _modulate_backward(outs: Any, x: Any, grad_output: Any, scale: Any, shift: Any) -> Any:
    del shift
    torch.mul(grad_output, 1 + scale[:, None], out=outs[0])
    torch.sum(grad_output * x, 1, out=outs[1])
    torch.sum(grad_output, 1, out=outs[2])
    return outs


def _exp_segsum(outs: Any, x: Any) -> Any:
    torch.exp(segment_sums(x), out=outs[0])
    return outs


def _exp_segsum_backward(outs: Any, y: Any, grad_output: Any) -> Any:
    m = (grad_output * y).tril()
    torch.sum(m.flip(-2).cumsum(-2).flip(-2).tril(-1), -1, out=outs[0])
    return outs


INTO: dict[str, Callable[..., Any]] = {
    "modulate": _modulate,
    "modulate_backward": _modulate_backward,
    "exp_segsum": _exp_segsum,
    "exp_segsum_backward": _exp_segsum_backward,
}


def eager(work: Work) -> Run:
    arrays, outs = tensors(work)
    operator = work.case.operator
    run = partial(TORCH[operator]) if outs is None else partial(INTO[operator], outs)
    return torch.no_grad()(partial(run, **arrays))


# -- autograd -----------------------------------------------------------------------------------


def autograd(work: Work) -> Run:
    """The backward pass of a graph that is kept: its time holds no forward pass."""
    arrays, outs = tensors(work)
    if not work.case.operator.endswith("_backward"):
        raise Absent("a backward pass only")
    if outs is not None:
        raise Absent("takes no out=")
    grad = arrays["grad_output"]
    if work.case.is_modulation:
        names = ("x", "scale", "shift")
        leaves = [arrays[name].detach().requires_grad_() for name in names]
        (root,) = TORCH["modulate"](*leaves)
        return partial(torch.autograd.grad, root, leaves, grad, retain_graph=True)
    y = arrays["y"]
    leaf = torch.zeros(y.shape[:-1], dtype=y.dtype, requires_grad=True)
    root = segment_sums(leaf)

    def run() -> Any:
        # exp's own backward, spelled out: y is given, and is no exponential of anything here.
        return torch.autograd.grad(root, leaf, grad * y, retain_graph=True)

    return run


# -- compiled -----------------------------------------------------------------------------------


def _copied(formula: Callable[..., Any], outs: Any, arrays: Mapping[str, Any]) -> Any:
    for out, result in zip(outs, formula(**arrays), strict=True):
        out.copy_(result)
    return outs


def compiled(work: Work) -> Run:
    """By Inductor, for exactly these shapes; compiled before any time is taken."""
    arrays, outs = tensors(work)
    formula = TORCH[work.case.operator]
    torch._dynamo.reset()
    if outs is None:
        run = partial(torch.compile(formula, dynamic=False), **arrays)
    else:  # the compiler writes results straight into `outs`
        function = torch.compile(partial(_copied, formula), dynamic=False)
        run = partial(function, outs, arrays)
    run = torch.no_grad()(run)
    run()
    return run
