"""Time tensors of PyTorch against arrays of NumPy, and against PyTorch's own operations.

    python tests/bench/torch_layer.py [--elements N] [--repeats N]

On the CPU, with as many threads of PyTorch as cupyops has. Arrays and tensors take turns, PyTorch's
own operations come after them, so that neither meets the memory that the other left. Times are
lower quartiles in milliseconds: other work on the machine only ever adds. "both" is forward and
backward; for tensors it contains all that autograd does. "bare" is the least that tensors can cost:
the functions of arrays on their memory, in an ``autograd.Function`` that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import cupyops  # noqa: E402 - of this checkout, whatever is installed
from cupyops._threads import THREADS  # noqa: E402

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDTH, BATCH, SEGMENT = 1024, 4, 128


def numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def plain_modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


def plain_exp_segsum(x: Tensor) -> Tensor:
    """exp(segsum(x)) as in listing 1 of the Mamba-2 paper."""
    t = x.shape[-1]
    mask = torch.ones(t, t, dtype=torch.bool)
    sums = x[..., None].expand(*x.shape, t).masked_fill(~mask.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~mask.tril(), -torch.inf).exp()


def quartiles(candidates: list[Callable[[], Any]], repeats: int) -> list[float]:
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(repeats + 2):
        for candidate, mine in zip(candidates, times, strict=True):
            start = time.perf_counter()
            result = candidate()
            if turn > 1:  # the first runs plan, import and touch memory
                mine.append(time.perf_counter() - start)
            del result
    return [1e3 * statistics.quantiles(mine)[0] for mine in times]


def forward_and_backward(function: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> Any:
    leaves = [value.detach().requires_grad_() for value in given]
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def bare(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """The function of tensors with these parts, which take and return arrays."""

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            result = tensor(forward(*map(numpy, tensors)))
            ctx.save_for_backward(*tensors, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            *tensors, result = map(numpy, ctx.saved_tensors)
            return tuple(map(tensor, backward(*tensors, result, numpy(grad))))

    return Bare.apply


def modulation(elements: int, dtype: torch.dtype) -> list[tuple[str, list[Callable[[], Any]]]]:
    shape = (BATCH, elements // (BATCH * WIDTH), WIDTH)
    x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    scale, shift = torch.randn(2, BATCH, WIDTH).to(dtype)
    plus = {"one_plus_scale": True}
    tensors, arrays = (
        {"scale": f(scale), "shift": f(shift), **plus} for f in (Tensor.detach, numpy)
    )
    gx, gg = numpy(x), numpy(grad)

    def ours(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=True)

    def both() -> Any:
        y = cupyops.modulate(gx, **arrays)
        grads = cupyops.modulate_backward(gx, grad_output=gg, **arrays)
        del y  # autograd too frees it before it returns
        return grads

    def forward_part(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
        return cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=True)

    def backward_part(x: Any, scale: Any, shift: Any, _: Any, grad: Any) -> Any:
        return cupyops.modulate_backward(x, grad_output=grad, scale=scale, shift=shift, **plus)

    given = [x, scale, shift]
    forward = [
        lambda: cupyops.modulate(gx, **arrays),
        lambda: cupyops.modulate(x, **tensors),
        lambda: tensor(forward_part(*map(numpy, given))),
        lambda: plain_modulate(*given),
    ]
    backward = [
        lambda: cupyops.modulate_backward(gx, grad_output=gg, **arrays),
        lambda: cupyops.modulate_backward(x, grad_output=grad, **tensors),
        lambda: [*map(tensor, backward_part(*map(numpy, (*given, x, grad))))],
    ]
    least = bare(forward_part, backward_part)
    full = [forward_and_backward(f, given, grad) for f in (ours, least, plain_modulate)]
    return [
        ("modulate", forward),
        ("modulate_backward", backward),
        ("modulate, both", [both, *full]),
    ]


def segment_sums(elements: int, dtype: torch.dtype) -> list[tuple[str, list[Callable[[], Any]]]]:
    x = -torch.rand(elements // SEGMENT**2, SEGMENT).to(dtype)
    grad = torch.randn(*x.shape, SEGMENT).to(dtype)
    y = cupyops.exp_segsum(x)
    gx, gy, gg = numpy(x), numpy(y), numpy(grad)

    def both() -> Any:
        z = cupyops.exp_segsum(gx)
        return cupyops.exp_segsum_backward(z, grad_output=gg)

    def backward_part(_: Any, y: np.ndarray, grad: np.ndarray) -> Any:
        return (cupyops.exp_segsum_backward(y, grad_output=grad),)

    forward = [
        lambda: cupyops.exp_segsum(gx),
        lambda: cupyops.exp_segsum(x),
        lambda: tensor(cupyops.exp_segsum(numpy(x))),
        lambda: plain_exp_segsum(x),
    ]
    backward = [
        lambda: cupyops.exp_segsum_backward(gy, grad_output=gg),
        lambda: cupyops.exp_segsum_backward(y, grad_output=grad),
        lambda: tensor(*backward_part(None, numpy(y), numpy(grad))),
    ]
    least = bare(cupyops.exp_segsum, backward_part)
    full = [
        forward_and_backward(f, [x], grad) for f in (cupyops.exp_segsum, least, plain_exp_segsum)
    ]
    return [
        ("exp_segsum", forward),
        ("exp_segsum_backward", backward),
        ("exp_segsum, both", [both, *full]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 22, help="of the largest array")
    parser.add_argument("--repeats", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    print(f"PyTorch {torch.__version__}, NumPy {np.__version__}, {options.elements} elements")
    print(
        f"{'':29} {'arrays':>8} {'bare':>8} {'tensors':>8} {'ratio':>6} {'eager':>8} {'ratio':>6}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for make in (modulation, segment_sums):
            for name, candidates in make(options.elements, dtype):
                arrays, tensors, least = quartiles(candidates[:3], options.repeats)
                figures = f"{arrays:8.3f} {least:8.3f} {tensors:8.3f} {tensors / arrays:6.2f}"
                for eager in quartiles(candidates[3:], options.repeats):
                    figures += f" {eager:8.3f} {eager / tensors:6.2f}"
                print(f"{name:19} {str(dtype).removeprefix('torch.'):9} {figures}")


if __name__ == "__main__":
    main()
