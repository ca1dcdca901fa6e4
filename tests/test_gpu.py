"""What only a real GPU can show: bits, streams, memory, refusals.

The contract itself runs on CuPy through the `xp` fixture, in the files that also run it on NumPy.
Every test here is skipped, with the reason, where there is no GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyops
from gpu_calls import OPERATORS, WITH_WORKSPACE, Call, assert_same, host, spinner
from libraries import Cupy, SimulatedGpu
from support import (
    array,
    assert_same_bits,
    forward_part,
    modulation_problem,
    poisoned,
    positional,
    shape_id,
)

pytestmark = pytest.mark.gpu

REPEATS = 100
MOMENT = 300_000
"""Clock cycles: a fraction of a millisecond, far longer than any kernel of a small problem."""
LONG = 300_000_000
"""Clock cycles: tenths of a second."""


@pytest.fixture(params=OPERATORS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def spin(cupy: Any) -> Callable[[int], None]:
    return spinner(cupy)


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["B,D", "D", "1,L,D", "B,L,D"])
@pytest.mark.parametrize("shape", [(2, 256, 1152), (3, 517, 1001), (48, 10, 2000)], ids=shape_id)
def test_modulation_has_the_bits_of_numpy(
    gpu: Cupy, shape: tuple[int, int, int], layout: str, dtype: str
) -> None:
    for parameter in sorted({dtype, "float32"}):
        rng = np.random.default_rng(7)
        both = modulation_problem(rng, shape, dtype, layout, "B,D", parameter)
        for name, values in (("modulate", forward_part(both)), ("modulate_backward", both)):
            sent = {key: gpu.put(value) for key, value in values.items()}
            for plus in (False, True):
                (x, rest), (sent_x, sent_rest) = positional(values), positional(sent)
                want = getattr(cupyops, name)(x, **rest, one_plus_scale=plus)
                got = getattr(cupyops, name)(sent_x, **sent_rest, one_plus_scale=plus)
                assert_same(host(got), list(want) if isinstance(want, tuple) else [want])


def test_a_gpu_gives_the_bits_of_the_cpu_executor(
    gpu: Cupy, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, simulated = Call(gpu, name, dtype), SimulatedGpu(monkeypatch)
    first, rest = positional({key: simulated.put(v) for key, v in call.host.items()})
    want = getattr(cupyops, name)(first, **rest)
    parts = want if isinstance(want, tuple) else (want,)
    assert_same(host(call.eager()), [simulated.get(part) for part in parts])


@pytest.mark.parametrize(
    "shape", [(65536, 1, 1), (70000, 2, 3), (1, 65537, 1), (1, 1, 65537)], ids=shape_id
)
def test_modulation_has_no_grid_limit(gpu: Cupy, shape: tuple[int, int, int], dtype: str) -> None:
    batch, length, width = shape
    ones = gpu.put(array(np.ones(shape), dtype))
    row = gpu.put(np.ones((batch, width), np.float32))
    out = gpu.put(poisoned(shape, ones.dtype))
    cupyops.modulate(ones, scale=row, shift=row, one_plus_scale=True, out=out)
    assert_same_bits(out.get(), array(np.full(shape, 3.0), dtype))
    grads = cupyops.modulate_backward(ones, grad_output=ones, scale=row, shift=row)
    # (1, D) is shared by the batch, which is one sample here: the same sums.
    sums = array(np.full((batch, width), float(length)), "float32")
    assert_same(host(grads), [array(np.ones(shape), dtype), sums, sums])


def test_segment_sums_have_no_grid_limit(gpu: Cupy, dtype: str) -> None:
    matrices = cupyops.exp_segsum(gpu.put(array(np.zeros((70000, 2)), dtype)))
    want = array(np.tile(np.tri(2), (70000, 1, 1)), dtype)
    assert_same(host(matrices), [want])
    got = cupyops.exp_segsum_backward(matrices, grad_output=matrices)
    assert_same(host(got), [array(np.tile([0.0, 1.0], (70000, 1)), dtype)])


def test_bits_do_not_change_while_another_stream_is_busy(
    gpu: Cupy, cupy: Any, name: str, dtype: str
) -> None:
    call = Call(gpu, name, dtype)
    if name == "modulate_backward":
        rng = np.random.default_rng(123)
        values = modulation_problem(rng, (2, 4096, 256), dtype, "B,D", "D")
        call.arrays = {key: gpu.put(value) for key, value in values.items()}
    want = host(call.eager())
    busy, load = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1 << 24, np.float32)
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        with busy:
            for _ in range(20):
                cupy.add(load, 1, out=load)
        assert_same(host(call.eager()), want)
    busy.synchronize()


# -- streams ------------------------------------------------------------------------------------


class Foreign:
    """A stream of another library. Its handle is left to the process: whoever wraps it might
    destroy it too."""

    def __init__(self, cupy: Any) -> None:
        runtime = cupy.cuda.runtime
        self.handle = runtime.streamCreateWithFlags(runtime.streamNonBlocking)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def external_stream(cupy: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated, and still met
        return cupy.cuda.ExternalStream(Foreign(cupy).handle)


STREAMS: dict[str, Callable[[Any], Any]] = {
    "null": lambda cupy: cupy.cuda.Stream.null,
    "per-thread": lambda cupy: cupy.cuda.Stream.ptds,
    "blocking": lambda cupy: cupy.cuda.Stream(),
    "non-blocking": lambda cupy: cupy.cuda.Stream(non_blocking=True),
    "ExternalStream": external_stream,
    "from_external": lambda cupy: cupy.cuda.Stream.from_external(Foreign(cupy)),
}


@pytest.mark.parametrize("how", ["current", "argument"])
@pytest.mark.parametrize("kind", STREAMS)
def test_everything_happens_in_the_order_of_the_stream(
    gpu: Cupy, cupy: Any, spin: Callable[[int], None], name: str, kind: str, how: str
) -> None:
    """Each x is NaN until its stream has passed a long kernel; a step elsewhere reads NaN."""
    stream, call = STREAMS[kind](cupy), Call(gpu, name)
    first = next(iter(call.arrays))
    dense = call.arrays[first]
    wide = cupy.empty((*dense.shape[:-1], 2 * dense.shape[-1]), dense.dtype)
    call.arrays[first] = x = wide[..., ::2]
    x[...] = dense
    plan, want = call.plan(), host(call.eager())
    cupy.cuda.Device().synchronize()
    for _ in range(REPEATS):
        with stream:
            x.fill(np.nan)
            spin(MOMENT)
            x[...] = dense
            if how == "current":
                result = call.run(plan)
        if how == "argument":
            result = call.run(plan, stream=stream)
        assert_same(host(result, stream), want)


def test_a_run_leaves_the_current_stream_as_it_was(gpu: Cupy, cupy: Any, name: str) -> None:
    call, before = Call(gpu, name), cupy.cuda.get_current_stream()
    plan, mine = call.plan(), cupy.cuda.Stream()
    other = cupy.cuda.Stream(non_blocking=True)
    mine.use()  # and not `with mine`: the end of an inner `with` would forget it
    try:
        call.run(plan, stream=other)
        assert cupy.cuda.get_current_stream() == mine
        call.eager()
        assert cupy.cuda.get_current_stream() == mine
    finally:
        before.use()
    cupy.cuda.Device().synchronize()


def test_what_is_no_stream_is_refused(gpu: Cupy, cupy: Any, name: str) -> None:
    call = Call(gpu, name)
    plan = call.plan()
    memory = call.memory(plan)
    for stream in (0, "null", object(), cupy.cuda.Event(), cupy.cuda.Device()):
        with pytest.raises(TypeError, match=f"{name}: stream is an? .*cupy.cuda.Stream"):
            call.run(plan, stream=stream, **memory)
    assert all(np.isnan(part).all() for part in host(memory["out"]))


def test_a_run_does_not_wait_for_the_gpu(
    gpu: Cupy, cupy: Any, spin: Callable[[int], None], name: str
) -> None:
    call, stream = Call(gpu, name), cupy.cuda.Stream(non_blocking=True)
    plan, want = call.plan(), host(call.eager())
    memory = call.memory(plan)
    call.run(plan, stream=stream, **memory)
    cupy.cuda.Device().synchronize()
    with stream:
        spin(LONG)
    call.run(plan, stream=stream, **memory)
    assert not stream.done, "the run waited for the work before it"
    assert_same(host(memory["out"], stream), want)


# -- memory -------------------------------------------------------------------------------------


def test_out_and_workspace_are_all_the_memory_of_a_run(gpu: Cupy, cupy: Any, name: str) -> None:
    class Requests(cupy.cuda.MemoryHook):
        name = "requests"
        count = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.count += 1

    call = Call(gpu, name)
    plan = call.plan()
    memory, pool = call.memory(plan), cupy.get_default_memory_pool()
    used, total = pool.used_bytes(), pool.total_bytes()
    with Requests() as requests:
        for _ in range(3):
            call.run(plan, **memory)
        assert requests.count == 0
        assert (pool.used_bytes(), pool.total_bytes()) == (used, total)
        call.run(plan)
        assert requests.count > 0  # the hook does see what is allocated


@pytest.mark.parametrize("fill", [0xFF, 0x00])
def test_a_workspace_may_start_anywhere_and_hold_anything(
    gpu: Cupy, cupy: Any, name: str, fill: int
) -> None:
    call = Call(gpu, name)
    plan, want = call.plan(), host(call.eager())
    assert bool(plan.workspace_size) == (name in WITH_WORKSPACE)
    out, size = call.memory(plan)["out"], plan.workspace_size
    for offset in range(16):
        for more in (0, 1000):
            memory = cupy.full(offset + size + more, fill, np.uint8)
            call.run(plan, out=out, workspace=memory[offset:])
            assert_same(host(out), want)


@pytest.mark.parametrize("name", WITH_WORKSPACE, indirect=True)
def test_other_workspaces_are_refused_and_nothing_is_written(
    gpu: Cupy, cupy: Any, name: str
) -> None:
    call = Call(gpu, name)
    plan = call.plan()
    out, size = call.memory(plan)["out"], plan.workspace_size
    inside = next(iter(call.arrays.values())).reshape(-1).view(np.uint8)
    for workspace, error, message in (
        (cupy.empty(size - 1, np.uint8), ValueError, f"has {size - 1} bytes"),
        (cupy.empty(size, np.int8), TypeError, "has dtype int8"),
        (cupy.empty(size, np.float32), TypeError, "has dtype float32"),
        (cupy.empty((2, size), np.uint8), ValueError, "one contiguous axis"),
        (cupy.empty(2 * size, np.uint8)[::2], ValueError, "one contiguous axis"),
        (cupy.empty(size, np.uint8)[::-1], ValueError, "one contiguous axis"),
        (np.empty(size, np.uint8), TypeError, "is an array of numpy"),
        (inside, ValueError, "overlaps|bytes"),
    ):
        with pytest.raises(error, match=f"{name}: workspace .*({message})"):
            call.run(plan, out=out, workspace=workspace)
    assert all(np.isnan(part).all() for part in host(out))


def test_numpy_and_cupy_do_not_mix(gpu: Cupy, name: str) -> None:
    call = Call(gpu, name)
    names = list(call.arrays)
    for key in names[1:]:
        with pytest.raises(TypeError, match=f"{name}: {key} is an array of numpy"):
            call.eager(**{key: call.host[key]})
    if names[1:]:
        with pytest.raises(TypeError, match=f"{name}: {names[1]} is an array of cupy"):
            call.eager(**{names[0]: call.host[names[0]]})
    result = call.eager()
    on_host = type(result)(*host(result)) if isinstance(result, tuple) else host(result)[0]
    with pytest.raises(TypeError, match=f"{name}: out.* is an array of numpy"):
        call.eager(out=on_host)


def test_elements_off_their_alignment_are_refused(
    gpu: Cupy, cupy: Any, name: str, dtype: str
) -> None:
    call = Call(gpu, name, dtype)
    plan, itemsize = call.plan(), next(iter(call.arrays.values())).dtype.itemsize
    for key, values in call.arrays.items():
        memory = cupy.zeros(2 * values.nbytes, np.uint8)
        for offset in {1, itemsize // 2}:
            moved = cupy.ndarray(values.shape, values.dtype, memory.data + offset)
            for refuse in (call.eager, lambda **more: call.run(plan, **more)):
                with pytest.raises(ValueError, match=f"{name}: {key} has elements at addresses"):
                    refuse(**{key: moved})
        steps = tuple(step + 1 for step in values.strides[:-1])
        if steps:
            odd = (*steps, values.strides[-1])
            moved = cupy.ndarray(values.shape, values.dtype, memory.data, strides=odd)
            with pytest.raises(ValueError, match=f"{name}: {key} has elements at addresses"):
                call.eager(**{key: moved})
