"""The operators as chains of torch operations, in the dtype of the tensors; results as a tuple."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Results = tuple[Any, ...]


def modulate(x: Any, scale: Any, shift: Any) -> Results:
    return (x * (1 + scale[:, None]) + shift[:, None],)


def modulate_backward(x: Any, grad_output: Any, scale: Any, shift: Any) -> Results:
    del shift  # of the call, but not of the formulas
    grad_scale = (grad_output * x).sum(1)
    return grad_output * (1 + scale[:, None]), grad_scale, grad_output.sum(1)


def segment_sums(x: Any) -> Any:
    t = x.shape[-1]
    ones = x.new_ones(t, t)
    columns = x[..., None].expand(*x.shape, t).masked_fill(ones.tril(-1) == 0, 0)
    return columns.cumsum(-2).masked_fill(ones.tril() == 0, -math.inf)


def exp_segsum(x: Any) -> Results:
    return (segment_sums(x).exp(),)


def exp_segsum_backward(y: Any, grad_output: Any) -> Results:
    m = (grad_output * y).tril()
    return (m.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1),)


TORCH: dict[str, Callable[..., Results]] = {
    "modulate": modulate,
    "modulate_backward": modulate_backward,
    "exp_segsum": exp_segsum,
    "exp_segsum_backward": exp_segsum_backward,
}
