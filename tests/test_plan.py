"""The plan layer: metadata only, one validation path, any number of runs, threads, the cache."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyops
from cupyops import _plan
from support import in_threads

OPERATORS = ["modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"]


class Call:
    """An operator with arguments that fit together: the first positional, the rest by name."""

    def __init__(self, name: str, seed: int = 0, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(seed)

        def array(*shape: int) -> np.ndarray:
            return rng.uniform(-2, 2, shape).astype(dtype)

        self.name = name
        self.arrays: dict[str, np.ndarray]
        if name.startswith("modulate"):
            self.first = array(3, 70, 5)
            self.arrays = {"scale": array(3, 5), "shift": array(5)}
        else:
            self.first = array(2, 3, 9) if name == "exp_segsum" else array(2, 3, 9, 9)
            self.arrays = {}
        if name.endswith("backward"):
            self.arrays["grad_output"] = array(*self.first.shape)

    def eager(self, **more: Any) -> Any:
        return getattr(cupyops, self.name)(self.first, **self.arrays, **more)

    def plan(self, **more: Any) -> cupyops.Plan:
        return getattr(cupyops, f"plan_{self.name}")(self.first, **self.arrays, **more)

    def run(self, plan: cupyops.Plan, **more: Any) -> Any:
        return plan.run(self.first, **self.arrays, **more)

    def outs(self) -> Any:
        """Outputs of the right form, filled with a sentinel."""
        result = self.eager()
        if isinstance(result, tuple):
            return cupyops.ModulateGrads(*(np.full_like(part, 77) for part in result))
        return np.full_like(result, 77)


@pytest.fixture(params=OPERATORS)
def call(request: pytest.FixtureRequest) -> Call:
    return Call(request.param)


def parts(result: Any) -> tuple[np.ndarray, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same_bits(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    for got, want in zip(parts(result), parts(expected), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()


def test_plan_and_run_give_the_bits_of_the_eager_call(call: Call) -> None:
    plan = call.plan()
    expected = call.eager()
    for _ in range(2):
        assert_same_bits(call.run(plan), expected)


def test_one_plan_serves_other_arrays_of_the_same_metadata(call: Call) -> None:
    plan = call.plan()
    other = Call(call.name, seed=1)
    assert_same_bits(other.run(plan), other.eager())


def test_options_are_fixed_by_the_plan() -> None:
    call = Call("modulate_backward")
    for flag in (False, True):
        plan = call.plan(one_plus_scale=flag)
        assert_same_bits(call.run(plan), call.eager(one_plus_scale=flag))
        with pytest.raises(TypeError, match="modulate_backward: one_plus_scale is not an argument"):
            call.run(plan, one_plus_scale=flag)


def test_out_is_filled_and_returned(call: Call) -> None:
    expected, outs = call.eager(), call.outs()
    result = call.run(call.plan(), out=outs)
    assert all(a is b for a, b in zip(parts(result), parts(outs), strict=True))
    assert_same_bits(result, expected)


def test_planning_computes_nothing(call: Call) -> None:
    outs = call.outs()
    call.plan(out=outs)
    assert all(np.all(part == 77) for part in parts(outs))


def test_a_plan_holds_no_array(call: Call) -> None:
    plan = call.plan()
    alive = [weakref.ref(array) for array in (call.first, *call.arrays.values())]
    del call.first, call.arrays
    gc.collect()
    assert all(ref() is None for ref in alive)
    assert plan.workspace_size == 0


def test_a_plan_is_immutable_and_stays_in_its_process(call: Call) -> None:
    plan = call.plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.workspace_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(plan)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(plan)


def test_repr_tells_operator_arrays_options_and_bytes() -> None:
    x = np.zeros((2, 256, 1152), np.float32)
    row = np.zeros((2, 1152), np.float32)
    plan = cupyops.plan_modulate_backward(x, grad_output=x, scale=row, one_plus_scale=True)
    traffic = 3 * x.nbytes + 2 * row.nbytes
    assert repr(plan) == (
        "<Plan modulate_backward(x=float32[2, 256, 1152], grad_output=float32[2, 256, 1152], "
        "scale=float32[2, 1152], one_plus_scale=True) -> grad_input=float32[2, 256, 1152], "
        f"grad_scale=float32[2, 1152]; numpy on cpu, workspace 0 bytes, traffic {traffic} bytes>"
    )


def test_traffic_of_modulation_counts_what_is_read() -> None:
    x, row = np.zeros((4, 16, 8), np.float32), np.zeros((4, 8), np.float32)
    position = np.zeros((1, 16, 8), np.float32)
    plan = cupyops.plan_modulate_backward
    assert plan(x, grad_output=x).traffic == 2 * x.nbytes
    assert plan(x, grad_output=x, shift=row).traffic == 2 * x.nbytes + row.nbytes
    # Two directions of summing read grad_output twice.
    traffic = plan(x, grad_output=x, scale=row, shift=position).traffic
    assert traffic == 4 * x.nbytes + 2 * row.nbytes + position.nbytes


def test_traffic_of_the_segment_sums_counts_what_is_needed() -> None:
    matrices = np.zeros((3, 5, 5), np.float16)
    backward = cupyops.plan_exp_segsum_backward(matrices, grad_output=matrices)
    assert backward.traffic == 2 * (3 * 10 * 2) + 3 * 5 * 2
    assert cupyops.plan_exp_segsum(matrices[0]).traffic == 5 * 5 * 2 + 5 * 5 * 5 * 2


# -- run checks that the arrays are those that were planned -------------------------------------


def changed(array: np.ndarray, what: str) -> np.ndarray:
    if what == "shape":
        return np.concatenate([array, array])
    if what == "dtype":
        return array.astype(np.float64)
    return np.flip(array, -1)


@pytest.mark.parametrize("what", ["shape", "dtype", "strides"])
def test_run_names_the_input_that_does_not_match(call: Call, what: str) -> None:
    plan, outs = call.plan(), call.outs()
    arrays = {plan.operator.inputs[0]: call.first, **call.arrays}
    for name, array in arrays.items():
        wrong = dict(arrays) | {name: changed(array, what)}
        got, planned = getattr(wrong[name], what), getattr(array, what)
        with pytest.raises(ValueError, match="as in the plan") as error:
            plan.run(wrong.pop(plan.operator.inputs[0]), **wrong, out=outs)
        assert str(error.value) == (
            f"{call.name}: {name} has {what} {got}; expected {planned}, as in the plan"
        )
    assert all(np.all(part == 77) for part in parts(outs))


@pytest.mark.parametrize("what", ["shape", "dtype", "strides"])
def test_run_names_the_output_that_does_not_match(call: Call, what: str) -> None:
    plan, outs = call.plan(), call.outs()
    for i, name in enumerate(plan.operator.outputs):
        wrong = list(parts(outs))
        wrong[i] = changed(wrong[i], what)
        out = tuple(wrong) if isinstance(outs, tuple) else wrong[0]
        label = f"out.{name}" if isinstance(outs, tuple) else name
        with pytest.raises(ValueError, match=f"{call.name}: {label} has {what} .*as in the plan"):
            call.run(plan, out=out)
    assert all(np.all(part == 77) for part in parts(outs))


def test_run_refuses_what_the_plan_was_made_without() -> None:
    call = Call("modulate_backward")
    x, grad_output = call.first, call.arrays["grad_output"]
    plan = cupyops.plan_modulate_backward(x, grad_output=grad_output)
    for name in ("scale", "shift"):
        message = f"modulate_backward: {name} is given; expected None, as in the plan"
        for given in (call.arrays[name], [1.0], 0):
            with pytest.raises(ValueError, match=message):
                plan.run(x, grad_output=grad_output, **{name: given})
    with pytest.raises(ValueError, match=r"out\.grad_scale is given; expected None"):
        plan.run(x, grad_output=grad_output, out=(None, call.arrays["scale"], None))


def test_run_refuses_missing_and_unknown_arguments(call: Call) -> None:
    plan = call.plan()
    for name in call.arrays:
        rest = {n: a for n, a in call.arrays.items() if n != name}
        with pytest.raises(
            TypeError, match=f"{call.name}: {name} is None; expected .* as in the plan"
        ):
            plan.run(call.first, **rest)
    with pytest.raises(TypeError, match=f"{call.name}: sclae is not an argument"):
        call.run(plan, sclae=call.first)
    with pytest.raises(TypeError, match=r"is a list; expected a numpy\.ndarray"):
        plan.run(call.first.tolist(), **call.arrays)


def test_strides_of_axes_without_steps_are_ignored() -> None:
    x = np.ones((1, 4, 3), np.float32)
    plan = cupyops.plan_modulate(x)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (4096, *x.strides[1:]))
    assert_same_bits(plan.run(odd), x)
    empty = np.ones((0, 4, 3), np.float32)
    assert cupyops.plan_modulate(empty).run(empty[:, ::-1]).shape == (0, 4, 3)


def test_a_strided_out_is_part_of_the_plan() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    wide = np.zeros((2, 3, 8), np.float32)
    plan = cupyops.plan_modulate(x, out=wide[..., 4:])
    result = plan.run(x, out=wide[..., :4])
    assert result.base is wide
    np.testing.assert_array_equal(wide[..., :4], x)
    assert not wide[..., 4:].any()
    with pytest.raises(ValueError, match=r"modulate: out has strides .* as in the plan"):
        plan.run(x, out=np.zeros_like(x))
    with pytest.raises(
        TypeError, match=r"modulate: out is None; expected .* with strides .* as in the plan"
    ):
        plan.run(x)


def test_plan_and_run_both_refuse_bad_memory(call: Call) -> None:
    outs = call.outs()
    for part in parts(outs):
        part.flags.writeable = False
    for refuse in (lambda: call.plan(out=outs), lambda: call.run(call.plan(), out=outs)):
        with pytest.raises(ValueError, match=f"{call.name}: out.* is read-only; expected"):
            refuse()


# -- plans without arrays -------------------------------------------------------------------------


def described(array: np.ndarray) -> cupyops.ArraySpec:
    return cupyops.ArraySpec(array.shape, array.dtype, strides=array.strides)


def test_a_plan_can_be_made_from_descriptions(call: Call) -> None:
    rest = {name: described(array) for name, array in call.arrays.items()}
    plan = getattr(cupyops, f"plan_{call.name}")(described(call.first), **rest)
    assert plan is call.plan()
    assert_same_bits(call.run(plan), call.eager())


def test_descriptions_of_outputs_fix_their_layout() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    wide = np.zeros((2, 3, 8), np.float32)
    plan = cupyops.plan_modulate(described(x), out=described(wide[..., :4]))
    plan.run(x, out=wide[..., 4:])
    np.testing.assert_array_equal(wide[..., 4:], x)
    with pytest.raises(TypeError, match=r"out is a cupyops\.ArraySpec; expected a tuple"):
        cupyops.plan_modulate_backward(x, grad_output=x, out=described(x))


def test_a_description_is_no_array(call: Call) -> None:
    plan = call.plan()
    for spec in (described(call.first), plan.inputs[0]):  # the very one of the plan, too
        with pytest.raises(TypeError, match=r"is a cupyops\.ArraySpec; expected a numpy"):
            plan.run(spec, **call.arrays)
    with pytest.raises(TypeError, match=r"is a cupyops\.ArraySpec; expected a numpy"):
        getattr(cupyops, call.name)(described(call.first), **call.arrays)


def test_a_description_can_be_copied_and_sent() -> None:
    spec = cupyops.ArraySpec((2, 3), ml_dtypes.bfloat16, strides=(-8, 2))
    for other in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec
        assert type(other) is cupyops.ArraySpec


def test_a_class_that_borrows_the_name_of_an_array_is_refused() -> None:
    borrowed = type("ndarray", (), {"__module__": "numpy", "shape": (3,), "strides": (4,)})
    with pytest.raises(TypeError, match=r"modulate: x is a numpy\.ndarray; expected"):
        cupyops.modulate(borrowed())


def test_metadata_of_a_dtype_stays_with_its_array() -> None:
    marked = np.ones((5, 6, 7), np.dtype(np.float32, metadata={"a": 1}))
    first, second = cupyops.modulate(marked), cupyops.modulate(np.ones((5, 6, 7), np.float32))
    assert first.dtype.metadata is None
    assert second.dtype.metadata is None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (((2, -1), "float32"), {}, ValueError, "shape is"),
        (((2.5,), "float32"), {}, TypeError, r"^ArraySpec: shape is \(2\.5,\); expected a tuple"),
        ((3, "float32"), {}, TypeError, "^ArraySpec: shape is 3; expected a tuple of integers"),
        (((2,), "no dtype"), {}, TypeError, "^ArraySpec: dtype is 'no dtype'; expected a dtype"),
        (((2,), "float32"), {"strides": 4}, TypeError, "^ArraySpec: strides is 4; expected"),
        (((2, 3), "float32"), {"strides": (4,)}, ValueError, "strides is"),
        (((2,), "float32"), {"library": "torch"}, ValueError, "library is 'torch'; expected"),
        (((2**40, 2**40), "float32"), {}, ValueError, r"expected at most 2\*\*63"),
        (((2,), "float32"), {"strides": (2**70,)}, ValueError, r"expected at most 2\*\*63"),
        (((2,), "float32"), {"device": 0}, ValueError, "device is 0; expected None or 'cpu'"),
        (((2,), "float32"), {"library": "cupy", "device": "gpu"}, ValueError, "device is 'gpu'"),
        (((2,), "float32"), {"library": "cupy", "device": -1}, ValueError, "device is -1"),
    ],
)
def test_impossible_descriptions_are_refused(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cupyops.ArraySpec(*arguments, **options)


def test_an_array_that_the_plan_has_must_be_given() -> None:
    x, row = np.ones((2, 3, 4), np.float32), np.ones((2, 4), np.float32)
    plan = cupyops.plan_modulate(x, shift=row, out=np.empty((2, 4, 3), np.float32).swapaxes(1, 2))
    with pytest.raises(TypeError, match=r"shift is None; expected float32\[2, 4\], as in the plan"):
        plan.run(x)
    with pytest.raises(TypeError, match=r"out is None; expected .* with strides \(48, 4, 12\), as"):
        plan.run(x, shift=row)


# -- workspace and stream -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_any_workspace_of_bytes_will_do(call: Call, size: int) -> None:
    workspace = np.full(size + 1, 0xA5, np.uint8)[1:]
    assert_same_bits(call.run(call.plan(), workspace=workspace), call.eager())


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        pytest.param(b"bytes", TypeError, "is a bytes; expected a numpy.ndarray", id="type"),
        pytest.param(np.zeros(9, np.int8), TypeError, "has dtype int8; expected uint8", id="dtype"),
        pytest.param(
            np.zeros((3, 3), np.uint8), ValueError, "expected one contiguous axis", id="2"
        ),
        pytest.param(np.zeros(9, np.uint8)[::2], ValueError, "one contiguous axis", id="stride"),
        pytest.param(np.zeros(9, np.uint8)[::-1], ValueError, "one contiguous axis", id="reversed"),
        pytest.param(np.broadcast_to(np.uint8(0), (9,)), ValueError, "one contiguous", id="zero"),
        pytest.param(np.frombuffer(b"read-only", np.uint8), ValueError, "is read-only", id="ro"),
    ],
)
def test_other_workspaces_are_refused(
    call: Call, workspace: Any, error: type[Exception], message: str
) -> None:
    outs = call.outs()
    with pytest.raises(error, match=f"{call.name}: workspace .*{message}"):
        call.run(call.plan(), workspace=workspace, out=outs)
    assert all(np.all(part == 77) for part in parts(outs))


def test_a_workspace_may_not_be_part_of_an_array(call: Call) -> None:
    outs = call.outs()
    for array in (call.first, *parts(outs)):
        shared = array.reshape(-1).view(np.uint8)
        with pytest.raises(ValueError, match=f"{call.name}: workspace overlaps"):
            call.run(call.plan(), workspace=shared, out=outs)


def test_numpy_has_no_streams(call: Call) -> None:
    with pytest.raises(TypeError, match=f"{call.name}: stream is given; expected None"):
        call.run(call.plan(), stream=object())


# -- the cache of the eager functions -----------------------------------------------------------


def test_eager_calls_share_one_plan_for_the_same_metadata(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = call.plan().operator
    built = []

    def build(*args: Any) -> cupyops.Plan:
        built.append(args)
        return operator.build(*args)

    counting = dataclasses.replace(operator, build=build)
    others = operator.inputs[1:]
    inputs = (call.first, *(call.arrays.get(name) for name in others))
    options = (False,) if call.name.startswith("modulate") else ()
    for _ in range(3):
        _plan.run_eagerly(counting, inputs, None, options)
    assert len(built) == 1
    _plan.run_eagerly(counting, tuple(a.astype(np.float64) for a in inputs), None, options)
    assert len(built) == 2


def test_the_cache_is_bounded() -> None:
    for length in range(_plan.CACHED_PLANS + 50):
        cupyops.exp_segsum(np.zeros((length, 1), np.float32))
    info = _plan._cached_plan.cache_info()
    assert info.maxsize == _plan.CACHED_PLANS
    assert info.currsize <= _plan.CACHED_PLANS


def test_failures_are_not_cached(call: Call) -> None:
    before = _plan._cached_plan.cache_info().currsize
    for _ in range(2):
        with pytest.raises(TypeError, match="has dtype int32"):
            getattr(cupyops, call.name)(call.first.astype(np.int32), **call.arrays)
    assert _plan._cached_plan.cache_info().currsize == before


# -- threads ------------------------------------------------------------------------------------


def test_one_plan_runs_in_many_threads_at_once(call: Call) -> None:
    plan = call.plan()
    calls = [Call(call.name, seed) for seed in range(8)]
    expected = [c.eager() for c in calls]
    outs = [c.outs() for c in calls]
    results = in_threads(8, lambda i: [calls[i].run(plan, out=outs[i]) for _ in range(20)][-1])
    for result, want in zip(results, expected, strict=True):
        assert_same_bits(result, want)


def test_eager_calls_in_many_threads_agree_with_one(call: Call) -> None:
    calls = [Call(call.name, seed) for seed in range(8)]
    expected = [c.eager() for c in calls]
    _plan._cached_plan.cache_clear()
    results = in_threads(8, lambda i: calls[i].eager())
    for result, want in zip(results, expected, strict=True):
        assert_same_bits(result, want)
