"""Tensors of PyTorch: the bits of the arrays, and their derivatives."""

from __future__ import annotations

import inspect
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import cupyops
import cupyops.torch
from oracle import exp_segsum_backward_exact, exp_segsum_exact, modulate_backward_exact
from support import (
    DTYPE_NAMES,
    LAYOUT_NAMES,
    assert_same_bits,
    assert_same_gradients,
    forward_part,
    gradient_pair,
    in_threads,
    laid_out,
    modulation_problem,
    positional,
    sequence,
    sprinkled,
    widen,
)
from tensors import (
    call,
    equal_bits,
    leaves,
    modulation,
    numpy,
    plain_exp_segsum,
    plain_modulate,
    tensor,
    tensors,
)

OPERATORS = ["modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"]
LAYOUTS = [None, *LAYOUT_NAMES]
PAIRS = [(a, b) for a, b in itertools.product(LAYOUTS, LAYOUTS) if a == b or "B,D" in (a, b)]
"""Every layout with itself, with rows for each sample, and alone."""
STRIDINGS = ["contiguous", "fortran", "sliced", "transposed", "offset", "chunk"]
"""Those of the tests that torch has, too: strides are never negative, elements are aligned."""


def problem_of(name: str, dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    if name == "exp_segsum":
        return {"x": sequence(rng, (2, 3, 20), dtype, "decay")}
    if name == "exp_segsum_backward":
        y, grad_output = gradient_pair(rng, (2, 3, 20, 20), dtype)
        return {"y": y, "grad_output": grad_output}
    both = modulation_problem(rng, (3, 70, 12), dtype, "B,D", "1,L,D")
    return both if name == "modulate_backward" else forward_part(both)


def as_arrays(result: Any) -> Any:
    if isinstance(result, Tensor):
        return numpy(result)
    return type(result)(*(None if part is None else numpy(part) for part in result))


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, tuple):
        assert_same_gradients(as_arrays(got), want)
    else:
        assert_same_bits(as_arrays(got), want)


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("striding", STRIDINGS)
@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_give_the_bits_of_arrays(name: str, striding: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    problem = problem_of(name, dtype)
    problem = {key: laid_out(sprinkled(rng, v, 0.02), striding) for key, v in problem.items()}
    got = call(name, tensors(problem))
    parts = got if isinstance(got, tuple) else (got,)
    assert all(type(part) is Tensor and part.is_contiguous() for part in parts)
    assert_same(got, call(name, problem))


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_gradients_have_the_bits_of_the_backward_function(
    pair: tuple[str | None, str | None], plus: bool, dtype: str
) -> None:
    for parameter in sorted({dtype, "float32", "float64"}):
        rng = np.random.default_rng(2)
        problem = modulation_problem(rng, (3, 70, 8), dtype, *pair, parameter)
        given = leaves(tensors(problem))
        y = call("modulate", given, one_plus_scale=plus)
        assert_same(y, call("modulate", forward_part(problem), one_plus_scale=plus))
        y.backward(tensor(problem["grad_output"]))
        want = call("modulate_backward", problem, one_plus_scale=plus)
        for key, expected in zip(("x", "scale", "shift"), want, strict=True):
            if expected is not None:
                assert_same_bits(numpy(given[key].grad), expected)


def test_the_gradient_of_segment_sums_has_the_bits_of_the_backward_function(dtype: str) -> None:
    x = tensor(problem_of("exp_segsum", dtype)["x"]).requires_grad_()
    y = cupyops.exp_segsum(x)
    grad = tensor(gradient_pair(np.random.default_rng(3), y.shape, dtype)[1])
    y.backward(grad)
    assert_same_bits(numpy(x.grad), cupyops.exp_segsum_backward(numpy(y), grad_output=numpy(grad)))
    assert (x.grad[..., 0] == 0).all()


def wide(values: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(widen(v).copy()).requires_grad_() for key, v in values.items()}


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("pair", [("B,D", "B,D"), ("1,L,D", "D"), ("B,L,D", None)], ids=str)
def test_gradients_are_those_of_the_plain_formula_within_the_bounds(
    pair: tuple[str | None, str | None], plus: bool, dtype: str
) -> None:
    rng = np.random.default_rng(4)
    problem = modulation_problem(rng, (2, 67, 3), dtype, *pair)
    given = leaves(tensors(problem))
    call("modulate", given, one_plus_scale=plus).backward(tensor(problem["grad_output"]))
    plain = wide(forward_part(problem))
    grad = torch.from_numpy(widen(problem["grad_output"]).copy())
    plain_modulate(**plain, one_plus_scale=plus).backward(grad)
    first, rest = positional(problem)
    allowed = modulate_backward_exact(first, **rest, one_plus_scale=plus)
    for key, exact in zip(("x", "scale", "shift"), allowed, strict=True):
        if exact is not None:
            off = np.abs(widen(numpy(given[key].grad)) - plain[key].grad.numpy())
            # The plain formula in float64 has errors as well, of the size of a float64 bound.
            slack = 2 if dtype == "float64" else 1 + 1e-6
            assert (off <= slack * exact[1].astype(np.float64)).all(), key


def test_the_gradient_of_segment_sums_is_that_of_the_plain_formula(dtype: str) -> None:
    rng = np.random.default_rng(5)
    values, length = sequence(rng, (30,), dtype, "decay"), 30
    grad = gradient_pair(rng, (length, length), dtype)[1]
    grad[np.triu_indices(length)] = 0  # the plain formula uses what lies there
    x, plain = tensor(values).requires_grad_(), wide({"x": values})["x"]
    y = cupyops.exp_segsum(x)
    y.backward(tensor(grad))
    plain_exp_segsum(plain).backward(torch.from_numpy(widen(grad).copy()))
    _, from_sums = exp_segsum_backward_exact(grad, numpy(y))
    _, error_of_y = exp_segsum_exact(values, dtype)
    lost = np.abs(widen(grad)) * error_of_y
    from_y = [lost[k:, :k].sum() for k in range(length)]
    off = np.abs(widen(numpy(x.grad)) - plain.grad.numpy())
    assert (off <= 2 * (from_sums + from_y)).all()


# -- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_first_and_second_derivatives_pass_gradcheck(
    pair: tuple[str | None, str | None], plus: bool
) -> None:
    given = leaves(modulation(*pair))
    names = list(given)

    def function(*values: Tensor) -> Tensor:
        return call("modulate", dict(zip(names, values, strict=True)), one_plus_scale=plus)

    assert gradcheck(function, tuple(given.values()))
    assert gradgradcheck(function, tuple(given.values()))


@pytest.mark.parametrize("names", ["x", "scale", "shift", "x scale", "x shift", "scale shift"])
@pytest.mark.parametrize("layout", ["B,D", "1,L,D"])
def test_derivatives_for_some_arguments(names: str, layout: str) -> None:
    given = leaves(modulation(layout, layout), *names.split())

    def function(*values: Tensor) -> Tensor:
        return call("modulate", dict(zip(given, values, strict=True)), one_plus_scale=True)

    assert gradcheck(function, tuple(given.values()))
    assert gradgradcheck(function, tuple(given.values()))


@pytest.mark.parametrize("shape", [(1,), (6,), (2, 5), (2, 2, 3)], ids=str)
def test_derivatives_of_segment_sums_pass_gradcheck(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert gradcheck(cupyops.exp_segsum, (x.requires_grad_(),))
    assert gradgradcheck(cupyops.exp_segsum, (x,))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_gradient_penalty_is_differentiated(dtype: str) -> None:
    """Second derivatives in every dtype, against the plain formula in float64."""
    rough = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-5, "float64": 1e-12}[dtype]

    def penalty(function: Any, given: list[Tensor]) -> list[Tensor]:
        grads = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        return [value.grad for value in given]

    def check(mine: Any, plain: Any, values: list[np.ndarray]) -> None:
        got = penalty(mine, [tensor(v.copy()).requires_grad_() for v in values])
        want = penalty(plain, list(wide(dict(enumerate(values))).values()))
        for g, w in zip(got, want, strict=True):
            assert (g.double() - w).abs().max() <= rough * w.abs().max()

    rng = np.random.default_rng(6)
    problem = forward_part(modulation_problem(rng, (2, 5, 3), dtype, "B,D", "D"))
    check(
        lambda x, scale, shift: cupyops.modulate(x, scale=scale, shift=shift),
        plain_modulate,
        list(problem.values()),
    )
    check(cupyops.exp_segsum, plain_exp_segsum, [sequence(rng, (6,), dtype, "decay")])


def test_a_reset_has_second_derivatives_without_nan() -> None:
    x = torch.tensor([-0.5, -torch.inf, -1.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(cupyops.exp_segsum(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(grad.detach(), torch.tensor([0, 0, np.exp(-1.0)]).double())
    assert not second.isnan().any()


def test_second_derivatives_are_zero_above_the_diagonal() -> None:
    """Of the operator behind the backward pass, whatever its arguments hold there."""
    pair = gradient_pair(np.random.default_rng(7), (2, 5, 5), "float64")
    y, grad = (tensor(values).requires_grad_() for values in pair)
    first = torch.ops.cupyops.exp_segsum_backward(y, grad)
    for second in torch.autograd.grad(first.square().sum(), (y, grad)):
        assert torch.equal(second != 0, torch.ones_like(second).tril(-1).bool())


# -- what is saved and computed -----------------------------------------------------------------


def saved_by(function: Any) -> list[Tensor]:
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        ("x", ["scale"]),
        ("scale", ["x"]),
        ("shift", []),
        ("x scale", ["x", "scale"]),
        ("x shift", ["scale"]),
        ("scale shift", ["x"]),
        ("x scale shift", ["x", "scale"]),
    ],
)
def test_the_least_is_saved_for_the_backward_pass(names: str, saved: list[str]) -> None:
    given = leaves(modulation("B,D", "B,D"), *names.split())
    kept = saved_by(lambda: call("modulate", given))
    assert [t.data_ptr() for t in kept] == [given[key].data_ptr() for key in saved]


def test_nothing_is_saved_that_is_not_there_or_has_no_derivative() -> None:
    given = leaves(modulation(None, "D"))
    assert saved_by(lambda: call("modulate", given)) == []
    constants = forward_part(modulation("B,D", "D"))
    assert saved_by(lambda: call("modulate", constants)) == []


def test_segment_sums_save_their_result_alone() -> None:
    x, results = torch.randn(2, 5, requires_grad=True), []
    kept = saved_by(lambda: results.append(cupyops.exp_segsum(x)))
    assert [t.data_ptr() for t in kept] == [results[0].data_ptr()]


class Calls(TorchDispatchMode):
    """Notes the operators of this package that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cupyops":
            self.names.append(function._schema.name.removeprefix("cupyops::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("names", "expected"),
    [("x", ["modulate"]), ("x scale", ["modulate_backward"]), ("shift", ["modulate_backward"])],
)
def test_only_what_is_asked_for_is_computed(names: str, expected: list[str]) -> None:
    given = leaves(modulation("B,D", "B,D"), *names.split())
    y = call("modulate", given)
    with Calls() as calls:
        y.sum().backward()
    assert calls.names == expected
    assert all((value.grad is not None) == (key in names) for key, value in given.items())


def test_the_gradient_of_an_identity_is_not_copied() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = cupyops.modulate(x)
    with Calls() as calls:
        (grad,) = torch.autograd.grad(y, x, ones := torch.ones(2, 3, 4))
    assert calls.names == []
    assert grad.data_ptr() == ones.data_ptr()


def test_a_change_of_what_was_saved_is_noticed() -> None:
    given = leaves(modulation("B,D", None), "scale")
    y = call("modulate", given)
    given["x"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- the module ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_the_module_has_the_functions_of_the_package(name: str) -> None:
    mine, theirs = (inspect.signature(getattr(m, name)) for m in (cupyops.torch, cupyops))
    assert list(mine.parameters) == list(theirs.parameters)
    for a, b in zip(mine.parameters.values(), theirs.parameters.values(), strict=True):
        assert (a.kind, a.default) == (b.kind, b.default)
    assert pickle.loads(pickle.dumps(getattr(cupyops.torch, name))) is getattr(cupyops.torch, name)
    problem = tensors(problem_of(name))
    first, rest = positional(problem)
    got, want = getattr(cupyops.torch, name)(first, **rest), call(name, problem)
    pairs = zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True)
    assert all(equal_bits(a, b) for a, b in pairs)


def test_every_example_of_the_module_runs() -> None:
    code = (
        "import doctest, sys, cupyops.torch\n"
        "failed, attempted = doctest.testmod(cupyops.torch)\n"
        "sys.exit(failed or attempted < 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_torch_the_module_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import cupyops\n"
        "try:\n    import cupyops.torch\n"
        "except ImportError as error:\n    print(error)\n"
    )
    root = Path(cupyops.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert "PyTorch could not be imported" in done.stdout
    assert "extra 'torch'" in done.stdout


def test_threads_get_the_same_bits() -> None:
    def work(_: int) -> list[Tensor]:
        given = leaves(tensors(problem_of("modulate")))
        call("modulate", given, one_plus_scale=True).square().sum().backward()
        a = tensor(problem_of("exp_segsum")["x"]).requires_grad_()
        cupyops.exp_segsum(a).square().sum().backward()
        return [value.grad for value in (*given.values(), a)]

    first, *others = in_threads(8, work)
    for other in others:
        assert all(equal_bits(a, b) for a, b in zip(first, other, strict=True))
