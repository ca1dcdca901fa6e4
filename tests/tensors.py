"""Tensors of PyTorch for the tests: arrays with the same memory, problems, and plain formulas."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import cupyops
from support import bits, modulation_problem, positional

# Small tensors, and several test processes on a few cores: threads would wait for each other.
torch.set_num_threads(1)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensor(array: np.ndarray) -> Tensor:
    """The same memory, with the same strides."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def numpy(given: Tensor) -> np.ndarray:
    given = given.detach()
    if given.dtype is torch.bfloat16:
        return given.view(torch.int16).numpy().view(BFLOAT16)
    return given.numpy()


def equal_bits(mine: Tensor, theirs: Tensor) -> bool:
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return False
    return bool((bits(numpy(mine)) == bits(numpy(theirs))).all())


def tensors(problem: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tensor(value) if isinstance(value, np.ndarray) else value
        for key, value in problem.items()
    }


def modulation(
    scale: str | None = "B,D", shift: str | None = "D", dtype: str = "float64", seed: int = 0
) -> dict[str, Tensor]:
    """x, grad_output and the parameters of these layouts."""
    rng = np.random.default_rng(seed)
    return tensors(modulation_problem(rng, (2, 3, 4), dtype, scale, shift))


def call(name: str, problem: dict[str, Any], **more: Any) -> Any:
    first, rest = positional(problem | more)
    return getattr(cupyops, name)(first, **rest)


def leaves(problem: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Copies without `grad_output`; those that are named (all if none is) require grad."""
    return {
        key: value.detach().clone().requires_grad_(not names or key in names)
        for key, value in problem.items()
        if key != "grad_output"
    }


def broadcast(parameter: Tensor) -> Tensor:
    """A parameter as torch's own broadcasting needs it beside x."""
    return parameter[:, None] if parameter.ndim == 2 else parameter


def plain_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    one_plus_scale: bool = False,
) -> Tensor:
    if scale is not None:
        x = x * (1 + broadcast(scale) if one_plus_scale else broadcast(scale))
    return x if shift is None else x + broadcast(shift)


def plain_exp_segsum(x: Tensor) -> Tensor:
    """Mamba-2's listing 1: repeat, mask, cumulate, mask, exp."""
    t = x.shape[-1]
    steps = x[..., None].expand(*x.shape, t).tril(-1)
    below = torch.ones(t, t, dtype=torch.bool).tril()
    return torch.cumsum(steps, -2).masked_fill(~below, -torch.inf).exp()
