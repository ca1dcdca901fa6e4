"""Whatever the aclnn layer is handed: a status and a text; no exception, no 561000, no write."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cupyops
from aclnn_calls import assert_failed, memory, phase_one, phase_two
from aclnn_table import ARGUMENTS, CALLS, FUNCTIONS, INVALID, NULLPTR, OUTPUTS, SUCCESS, tensors
from cupyops import aclnn


def imposter(module: Any, name: str, **namespace: Any) -> Any:
    """An object whose class claims a name that it has no right to."""
    made = type(name, (), namespace)
    made.__module__ = module
    made.__qualname__ = name
    return made()


def fails(*args: Any) -> Any:
    raise OSError("no answer")


class Raises:
    __getattribute__ = __index__ = __int__ = __eq__ = __bool__ = __len__ = __hash__ = fails
    __iter__ = __repr__ = __str__ = __array__ = __class__ = fails


class Secret(type):
    """A class that tells neither module nor name."""

    __getattribute__ = __hash__ = __eq__ = fails


class Nameless(metaclass=Secret):
    pass


class Unprintable(Exception):
    __str__ = fails


def unprintable(*args: Any) -> Any:
    raise Unprintable


class Slippery(int):
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __index__ = __int__ = __bool__ = fails
    __hash__ = int.__hash__


def as_matrix() -> Any:
    with pytest.warns(PendingDeprecationWarning):
        return np.matrix(np.zeros((2, 4), np.float32))


LIKE = {"shape": (2, 3, 4), "dtype": np.dtype("f4"), "strides": (48, 16, 4)}
GARBAGE: dict[str, Callable[[], Any]] = {
    "list": lambda: [[[1.0]]],
    "tuple": lambda: (np.zeros(3), None, None),
    "string": lambda: "grad_output",
    "bytes": lambda: bytes(96),
    "int": lambda: 0,
    "huge": lambda: 10**5000,
    "float": lambda: 1.0,
    "nan": lambda: float("nan"),
    "bool": lambda: True,
    "dict": dict,
    "type": lambda: np.ndarray,
    "module": lambda: np,
    "function": lambda: phase_one,
    "generator": lambda: (n for n in range(3)),
    "memoryview": lambda: memoryview(bytes(96)),
    "numpy scalar": lambda: np.float32(1),
    "numpy dtype": lambda: np.dtype("f4"),
    "matrix": as_matrix,
    "masked": lambda: np.ma.masked_array(np.zeros((2, 3, 4), np.float32)),
    "recarray": lambda: np.zeros((2, 3, 4), "f4").view(np.recarray),
    "chararray": lambda: np.char.array(["a"]),
    "object array": lambda: np.full((2, 3, 4), None),
    "spec": lambda: cupyops.ArraySpec((2, 3, 4), "float32"),
    "plan": lambda: cupyops.plan_exp_segsum(np.zeros((2, 3), np.float32)),
    "executor": aclnn.aclOpExecutor,
    "status": lambda: aclnn.ACLNN_SUCCESS,
    "Raises": Raises,
    "Nameless": Nameless,
    "Slippery": lambda: Slippery(4),
    "numpy imposter": lambda: imposter("numpy", "ndarray"),
    "numpy imposter with metadata": lambda: imposter("numpy", "ndarray", **LIKE),
    "numpy imposter with an address": lambda: imposter(
        "numpy", "ndarray", **LIKE, __array_interface__={"data": (64, False)}
    ),
    "cupy imposter": lambda: imposter("cupy", "ndarray", **LIKE),
    "imposter that raises": lambda: imposter("numpy", "ndarray", __getattribute__=unprintable),
    "module is a list": lambda: imposter(["numpy"], "ndarray"),
    "torch imposter": lambda: imposter("torch", "Tensor", **LIKE),
    "no name": lambda: imposter("builtins", ""),
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_what_is_no_tensor_is_invalid(function: str, argument: str, kind: str) -> None:
    arguments = tensors(function) | {argument: GARBAGE[kind]()}
    before = memory(arguments)
    status, size, executor = phase_one(function, arguments)
    assert_failed(function, status, INVALID, argument)
    assert (size, executor) == (0, None)
    assert memory(arguments) == before


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("argument", ["workspace", "workspace_size", "executor", "stream"])
def test_phase_two_takes_no_garbage_either(argument: str, kind: str) -> None:
    if (argument, kind) in {("workspace_size", "int"), ("workspace_size", "status")}:
        return  # a 0 is what it takes
    arguments = tensors("aclnnModulate")
    before = memory(arguments)
    _, size, executor = phase_one("aclnnModulate", arguments)
    call = {"workspace": None, "workspace_size": size, "executor": executor, "stream": None}
    status = phase_two("aclnnModulate", *(call | {argument: GARBAGE[kind]()}).values())
    is_number = argument == "workspace_size" and kind in ("bool", "Slippery")  # bytes of nothing
    assert_failed("aclnnModulate", status, NULLPTR if is_number else INVALID, argument)
    assert memory(arguments) == before
    assert phase_two("aclnnModulate", *call.values()) == SUCCESS


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", ["aclSetAclOpExecutorRepeatable", "aclDestroyAclOpExecutor"])
def test_what_is_no_executor_has_no_life(name: str, kind: str) -> None:
    assert_failed(name, getattr(aclnn, name)(GARBAGE[kind]()), INVALID, "executor")


# -- random calls -------------------------------------------------------------------------------

DTYPES = ["f4", "f2", ml_dtypes.bfloat16, "f8", "i4", "c8", "?", ">f4", ml_dtypes.float8_e5m2]
SHAPES = [(), (4,), (2, 4), (2, 1, 4), (2, 3, 4), (2, 3, 5, 5), (2, 3, 5), (2, 0, 4), (0, 3, 4)]
SHAPES += [(2, 2, 3, 5), (2, 2, 3, 5, 5), (1, 1, 1, 1, 1, 1), (5, 5), (2, 5, 3), (2, 3, 0, 0)]


def random_tensor(rng: random.Random, arguments: dict[str, Any]) -> Any:
    """None, garbage, another tensor of the call or a view of it, or an array of any kind."""
    choice = rng.randrange(6)
    if choice == 0:
        return None
    if choice == 1:
        return GARBAGE[rng.choice(list(GARBAGE))]()
    if choice == 2:
        return rng.choice(list(arguments.values()))
    made = np.zeros(rng.choice(SHAPES), rng.choice(DTYPES))
    if choice == 3:
        other = rng.choice([a for a in arguments.values() if type(a) is np.ndarray] or [made])
        view = other.view()
        view.flags.writeable = rng.random() < 0.5 and other.flags.writeable
        return view[::-1] if view.ndim and rng.random() < 0.5 else view
    if choice == 4 and made.ndim:
        return np.broadcast_to(made[:1], made.shape)
    return made


def random_number(rng: random.Random) -> Any:
    sizes = [0, 0, 0, 1, -1, 64, 2**63, 2**64, np.int64(0), np.uint8(3), None]
    return GARBAGE[rng.choice(list(GARBAGE))]() if rng.random() < 0.2 else rng.choice(sizes)


def test_ten_thousand_malformed_calls_raise_nothing_and_write_nothing() -> None:
    rng = random.Random(20261130)
    executors: list[tuple[Any, dict[str, Any]]] = []
    seen: dict[int, int] = {}
    pool = {function: tensors(function) for function in FUNCTIONS}
    calls = 0
    while calls < 10_000:
        function = rng.choice(FUNCTIONS)
        arguments = dict(pool[function])
        for name in rng.sample(list(arguments), rng.choice([0, 1, 1, 1, 2, 2])):
            arguments[name] = random_tensor(rng, arguments)
        before = memory(arguments)
        status, size, executor = phase_one(function, arguments)
        assert memory(arguments) == before
        if status == SUCCESS:
            executors.append((executor, arguments))
        else:
            assert_failed(function, status, status)
            assert (size, executor) == (0, None)
        seen[status] = seen.get(status, 0) + 1
        calls += status != SUCCESS

        used, bound = rng.choice(executors or [(None, {})])
        if rng.random() < 0.05:
            rng.choice([aclnn.aclDestroyAclOpExecutor, aclnn.aclSetAclOpExecutorRepeatable])(used)
        executor = GARBAGE[rng.choice(list(GARBAGE))]() if rng.random() < 0.2 else used
        workspace = random_tensor(rng, bound) if rng.random() < 0.5 else None
        stream = None if rng.random() < 0.8 else GARBAGE[rng.choice(list(GARBAGE))]()
        bytes_ = random_number(rng)
        before = memory(bound)
        status = phase_two(rng.choice(FUNCTIONS), workspace, bytes_, executor, stream)
        if status != SUCCESS:
            assert memory(bound) == before
        seen[status] = seen.get(status, 0) + 1
        calls += status != SUCCESS
    assert set(seen) == {SUCCESS, NULLPTR, INVALID}
    assert min(seen.values()) > 100, seen


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
)
arrays = st.builds(
    np.zeros,
    hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4),
    st.one_of(hnp.scalar_dtypes(), st.sampled_from(["f4", "f2", ml_dtypes.bfloat16])),
)
NOTHING = st.just(lambda: None)
# makers, since hypothesis asks a drawn value what it is
anything = st.one_of(
    st.one_of(scalars, st.lists(scalars, max_size=3), arrays).map(lambda value: lambda: value),
    st.sampled_from(list(GARBAGE)).map(lambda kind: lambda: GARBAGE[kind]()),
)


@settings(max_examples=1000)
@given(st.data())
def test_arbitrary_arguments_raise_nothing(data: st.DataObject) -> None:
    function = data.draw(st.sampled_from(FUNCTIONS))
    names = list(CALLS[function])
    arguments = tensors(function)
    replaced = data.draw(st.sets(st.sampled_from(names), max_size=len(names)))
    arguments |= {name: data.draw(anything)() for name in names if name in replaced}
    before = memory(arguments)
    status, size, executor = phase_one(function, arguments)
    assert status in (SUCCESS, NULLPTR, INVALID), aclnn.aclGetRecentErrMsg()
    assert memory(arguments) == before
    if status != SUCCESS:
        assert_failed(function, status, status)
        assert (size, executor) == (0, None)
    workspace, bytes_, stream = (data.draw(NOTHING | anything)() for _ in range(3))
    status = phase_two(function, workspace, bytes_, executor, stream)
    assert status in (SUCCESS, NULLPTR, INVALID), aclnn.aclGetRecentErrMsg()
    inputs = {name: value for name, value in arguments.items() if name not in OUTPUTS}
    left_alone = inputs if status == SUCCESS else arguments
    assert memory(left_alone).items() <= before.items()
