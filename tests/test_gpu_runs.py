"""What only a real GPU can show: several devices, graphs, threads, the kernel cache, sizes.

Every test here is skipped, with the reason, where there is no GPU (or too small a one).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyops
from cupyops import _kernels, _plan
from gpu_calls import OPERATORS, Call, assert_same, host
from libraries import Cupy
from support import array, assert_same_bits, sequence

pytestmark = pytest.mark.gpu


@pytest.fixture(params=OPERATORS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# -- devices ------------------------------------------------------------------------------------


@pytest.fixture
def second(cupy: Any) -> Any:
    """Another device than the current one."""
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs, found {count}")
    return cupy.cuda.Device(1)


def test_arrays_decide_the_device_of_a_call(gpu: Cupy, cupy: Any, second: Any, name: str) -> None:
    want = host(Call(gpu, name).eager())
    with second:
        call = Call(gpu, name)
        stream = cupy.cuda.Stream(non_blocking=True)
        second.synchronize()
    plan = call.plan()
    for result in (call.eager(), call.run(plan), call.run(plan, stream=stream)):
        assert cupy.cuda.Device().id == 0
        second.synchronize()
        for part in result if isinstance(result, tuple) else (result,):
            assert part.device.id == 1
        assert_same(host(result), want)


def test_a_call_leaves_the_current_device_as_it_was(gpu: Cupy, cupy: Any, second: Any) -> None:
    with second:
        call = Call(gpu, "modulate")
    second.use()  # and not `with second`: the end of an inner `with` would forget it
    try:
        call.eager()
        assert cupy.cuda.Device().id == 1
    finally:
        cupy.cuda.Device(0).use()


def test_another_device_is_refused(gpu: Cupy, cupy: Any, second: Any, name: str) -> None:
    here = Call(gpu, name)
    with second:
        there, stream = Call(gpu, name), cupy.cuda.Stream()
        other = there.memory(there.plan())
    plan = here.plan()
    for key in list(here.arrays)[1:]:
        with pytest.raises(ValueError, match=f"{name}: {key} is on device cuda:1; .*cuda:0"):
            here.eager(**{key: there.arrays[key]})
    memory = here.memory(plan)
    with pytest.raises(ValueError, match=f"{name}: out.* is on device cuda:1; .*cuda:0"):
        here.eager(out=other["out"])
    with pytest.raises(ValueError, match=f"{name}: workspace is on device cuda:1; .*cuda:0"):
        here.run(plan, out=memory["out"], workspace=other["workspace"])
    with pytest.raises(ValueError, match=f"{name}: stream belongs to device cuda:1; .*cuda:0"):
        here.run(plan, stream=stream, **memory)
    assert all(np.isnan(part).all() for part in host(memory["out"]))


# -- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["current", "argument"])
def test_a_captured_run_computes_anew_from_changed_inputs(
    gpu: Cupy, cupy: Any, name: str, how: str
) -> None:
    call, stream = Call(gpu, name), cupy.cuda.Stream(non_blocking=True)
    plan = call.plan()
    memory = call.memory(plan)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        if how == "current":
            call.run(plan, **memory)
    if how == "argument":
        call.run(plan, stream=stream, **memory)
    with stream:
        graph = stream.end_capture()
    parts = memory["out"] if isinstance(memory["out"], tuple) else (memory["out"],)
    assert all(np.isnan(part).all() for part in host(memory["out"])), "a capture ran"
    for seed in (1, 2, 3):
        other = Call(gpu, name, seed=seed)
        want = host(other.eager())
        for key, values in call.arrays.items():
            values[...] = other.arrays[key]
        for part in parts:
            part.fill(np.nan)
        memory["workspace"].fill(0xFF)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        assert_same(host(memory["out"], stream), want)


# -- threads ------------------------------------------------------------------------------------


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)

    def start(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def test_one_plan_runs_in_many_threads_on_their_own_streams(
    gpu: Cupy, cupy: Any, name: str
) -> None:
    calls = [Call(gpu, name, seed=seed) for seed in range(8)]
    plan, want = calls[0].plan(), [host(call.eager()) for call in calls]
    memory = [call.memory(plan) for call in calls]
    cupy.cuda.Device().synchronize()

    def work(i: int) -> list[np.ndarray]:
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(50):
            calls[i].run(plan, stream=stream, **memory[i])
            got = host(memory[i]["out"], stream)
            assert_same(got, want[i])
        return got

    for got, expected in zip(together(8, work), want, strict=True):
        assert_same(got, expected)


def test_first_use_in_many_threads_at_once(
    gpu: Cupy, cupy: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(gpu, name)
    want = host(call.eager())
    monkeypatch.setitem(_plan.EXECUTORS, "cupy", _kernels.CupyExecutor())
    _plan._cached_plan.cache_clear()
    try:
        for got in together(8, lambda i: host(call.eager())):
            assert_same(got, want)
    finally:
        _plan._cached_plan.cache_clear()  # its plans were prepared by that executor


# -- the cache of compiled kernels --------------------------------------------------------------

FIRST_CALLS = """
import json, time
import numpy as np, cupy, cupyops
rows, matrices = cupy.ones((2, 200, 64), np.float32), cupy.ones((2, 1100, 1100), np.float32)
cupy.cuda.Device().synchronize()
seconds = {}
for name, first, more in (
    ("modulate", rows, {"scale": rows[:, 0]}),
    ("modulate_backward", rows, {"grad_output": rows, "scale": rows[:, 0]}),
    ("exp_segsum", matrices[0, :9], {}),
    ("exp_segsum_backward", matrices, {"grad_output": matrices}),
):
    start = time.perf_counter()
    getattr(cupyops, name)(first, **more)
    cupy.cuda.Device().synchronize()
    seconds[name] = round(time.perf_counter() - start, 4)
print(json.dumps(seconds))
"""


def test_a_second_process_loads_what_the_first_compiled(
    gpu: Cupy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = dict(os.environ, CUPY_CACHE_DIR=str(tmp_path), CUPY_CACHE_IN_MEMORY="0")
    here = str(Path(cupyops.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    seen: list[dict[str, int]] = []
    for state in ("cold", "warm"):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        with capsys.disabled():
            print(f"\nfirst calls in seconds, {state} kernel cache: {json.loads(done.stdout)}")
        # What is compiled is written as a new file, also where one of its name exists.
        seen.append({path.name: path.stat().st_ino for path in tmp_path.iterdir()})
    assert len(seen[0]) >= len(OPERATORS)
    assert seen[1] == seen[0]


# -- more than 2^31 elements --------------------------------------------------------------------

TALL, WIDTH, BLOCK_ROWS = 524289, 4096, 1024
"""Rows and columns of 2^31 + 4096 elements, and rows of the block that repeats in them."""
SEGMENTS, LENGTH, BLOCK_SEGMENTS = 32769, 256, 63
"""Segments whose matrices have 2^31 + 65536 elements, and segments that repeat."""


def require_memory(cupy: Any, gibibytes: float) -> None:
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory, found {free:.1f}")


def as_bits(cupy: Any, values: Any) -> Any:
    """The memory of an array of 16-bit elements."""
    return cupy.ndarray(values.shape, np.uint16, values.data)


def repeated(cupy: Any, block: np.ndarray, rows: int) -> Any:
    """(rows, ...) on the GPU: the block over and over."""
    source = cupy.asarray(block.view(np.uint16))
    tall = cupy.empty((rows, *block.shape[1:]), np.uint16)
    for start in range(0, rows, len(block)):
        part = tall[start : start + len(block)]
        part[...] = source[: len(part)]
    return cupy.ndarray(tall.shape, block.dtype, tall.data)


def assert_repeats(cupy: Any, tall: Any, block: np.ndarray) -> None:
    """Every row has the bits of its place in the block."""
    assert tall.dtype == block.dtype
    bits, want = as_bits(cupy, tall), cupy.asarray(block.view(np.uint16))
    for start in range(0, len(tall), len(block)):
        part = bits[start : start + len(block)]
        assert bool((part == want[: len(part)]).all()), f"wrong in rows from {start} on"


def small_integers(seed: int) -> np.ndarray:
    """Sums of their products are exact in float32, in any number of rows that is tested."""
    drawn = np.random.default_rng(seed).integers(-3, 4, (BLOCK_ROWS, WIDTH))
    return array(drawn, "bfloat16")


def parameters(gpu: Cupy) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    draw = np.random.default_rng(5).standard_normal((2, WIDTH)).astype(np.float32)
    host_side = {"scale": draw[:1], "shift": draw[1:]}
    return host_side, {key: gpu.put(value) for key, value in host_side.items()}


def test_modulate_reaches_beyond_two_to_the_31_elements(gpu: Cupy, cupy: Any) -> None:
    require_memory(cupy, 9)
    block, (on_host, on_gpu) = small_integers(1), parameters(gpu)
    x = repeated(cupy, block, TALL)[None]
    out = cupyops.modulate(x, **on_gpu, one_plus_scale=True)
    want = cupyops.modulate(block[None], **on_host, one_plus_scale=True)
    assert_repeats(cupy, out[0], want[0])
    del x, out
    cupy.get_default_memory_pool().free_all_blocks()


def test_modulate_backward_reaches_beyond_two_to_the_31_elements(gpu: Cupy, cupy: Any) -> None:
    require_memory(cupy, 14)
    blocks, (on_host, on_gpu) = (small_integers(2), small_integers(3)), parameters(gpu)
    x, grad_output = (repeated(cupy, block, TALL)[None] for block in blocks)
    got = cupyops.modulate_backward(x, grad_output=grad_output, **on_gpu)
    xs, grads = (block[None] for block in blocks)
    want = cupyops.modulate_backward(xs, grad_output=grads, **on_host)
    assert_repeats(cupy, got.grad_input[0], want.grad_input[0])
    wide_x, wide_grad = (block.astype(np.float64) for block in blocks)
    for sums, terms in ((got.grad_scale, wide_grad * wide_x), (got.grad_shift, wide_grad)):
        exact = TALL // BLOCK_ROWS * terms.sum(0) + terms[: TALL % BLOCK_ROWS].sum(0)
        assert_same_bits(sums.get(), exact[None].astype(np.float32))
    del x, grad_output, got
    cupy.get_default_memory_pool().free_all_blocks()


def test_segment_sums_reach_beyond_two_to_the_31_elements(gpu: Cupy, cupy: Any) -> None:
    require_memory(cupy, 5)
    rng = np.random.default_rng(6)
    block = sequence(rng, (BLOCK_SEGMENTS, 1, LENGTH), "float16", "decay")
    few = cupyops.exp_segsum(gpu.put(block))
    many = cupyops.exp_segsum(repeated(cupy, block, SEGMENTS))
    assert_repeats(cupy, many, few.get())
    few = cupyops.exp_segsum_backward(few, grad_output=few)
    many = cupyops.exp_segsum_backward(many, grad_output=many)
    assert_repeats(cupy, many, few.get())
    del many
    cupy.get_default_memory_pool().free_all_blocks()
