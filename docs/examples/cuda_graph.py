"""Forward and backward of a modulation as one CUDA graph: captured once, replayed on new inputs.

Plans compile and load the kernels, outputs and workspace are allocated beforehand, so that a run
only launches, which a stream can capture. Compares the bits of replays with those of plain runs and
times both. Without a GPU the same plans run on NumPy, and nothing is captured:

    python docs/examples/cuda_graph.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupyops

SHAPE = (2, 256, 1152)  # (B, L, D) of DiT-XL/2 at 256 x 256 pixels
INPUTS = ("x", "grad_output", "scale", "shift")
REPEATS, ROUNDS = 100, 7


def array_library() -> tuple[Any, str]:
    """CuPy and "", or NumPy and why."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return np, "CuPy is not installed"
    except Exception as error:
        return np, f"CuPy sees no GPU ({error})"
    return (cupy, "") if count else (np, "CuPy sees no GPU")


def random_inputs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    b, _, d = SHAPE
    shapes = dict(zip(INPUTS, (SHAPE, SHAPE, (b, d), (b, d)), strict=True))
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


class Step:
    """Both plans, and all memory that they touch. A graph keeps the addresses: so does this."""

    def __init__(self, xp: Any) -> None:
        self.arrays = {name: xp.asarray(a) for name, a in random_inputs(seed=0).items()}
        x, grad_output, scale, shift = (self.arrays[name] for name in INPUTS)
        self.forward = cupyops.plan_modulate(x, scale=scale, shift=shift, one_plus_scale=True)
        self.backward = cupyops.plan_modulate_backward(
            x, grad_output=grad_output, scale=scale, shift=shift, one_plus_scale=True
        )
        self.y = xp.empty_like(x)
        self.grads = cupyops.ModulateGrads(*(xp.empty_like(a) for a in (x, scale, shift)))
        # One workspace for both plans, as they run one after the other.
        size = max(self.forward.workspace_size, self.backward.workspace_size)
        self.workspace = xp.empty(size, np.uint8)

    def run(self) -> None:
        """Forward and backward on the current stream. Allocates nothing, waits for nothing."""
        x, grad_output, scale, shift = (self.arrays[name] for name in INPUTS)
        memory = {"workspace": self.workspace}
        self.forward.run(x, scale=scale, shift=shift, out=self.y, **memory)
        self.backward.run(
            x, grad_output=grad_output, scale=scale, shift=shift, out=self.grads, **memory
        )

    def results(self) -> dict[str, Any]:
        return {"y": self.y, **self.grads._asdict()}

    def forget_results(self) -> None:
        for array in self.results().values():
            array.fill(np.nan)


def check(step: Step, launch: Callable[[], None], set_inputs: Callable[[Any], None]) -> None:
    """New inputs into the same memory, twice: `launch` must give the bits of NumPy."""
    for seed in (1, 2):
        inputs = random_inputs(seed)
        set_inputs(inputs)
        step.forget_results()
        launch()
        x, rest = inputs.pop("x"), inputs
        grads = cupyops.modulate_backward(x, **rest, one_plus_scale=True)
        y = cupyops.modulate(x, scale=rest["scale"], shift=rest["shift"], one_plus_scale=True)
        for name, want in {"y": y, **grads._asdict()}.items():
            got = step.results()[name]
            if (got if isinstance(got, np.ndarray) else got.get()).tobytes() != want.tobytes():
                raise SystemExit(f"{name} differs from NumPy's bits")


def capture(stream: Any, work: Callable[[], None]) -> Any:
    """What `work` launches on the stream, as a graph; none of it runs."""
    stream.begin_capture()
    try:
        work()
    finally:
        graph = stream.end_capture()  # also after an error, or the stream would go on capturing
    return graph


def microseconds(cupy: Any, stream: Any, launch: Callable[[], None]) -> float:
    """Time of one launch among many, by events on the stream; the median of some rounds."""
    times = []
    for _ in range(ROUNDS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(REPEATS):
            launch()
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) / REPEATS * 1e3)
    return float(np.median(times))


def on_gpu(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)  # the null stream cannot capture
    with stream:  # current from here on: copies, allocations and runs are in one order
        step = Step(cupy)
        graph = capture(stream, step.run)

        def set_inputs(inputs: dict[str, np.ndarray]) -> None:
            for name, values in inputs.items():
                step.arrays[name].set(values)

        check(step, step.run, set_inputs)
        check(step, lambda: graph.launch(stream), set_inputs)
        print("replays and plain runs give the same bits, on changed inputs too")
        for name, launch in {"plain runs": step.run, "graph": lambda: graph.launch(stream)}.items():
            print(f"{name:>10}: {microseconds(cupy, stream, launch):8.1f} us for each step")
        stream.synchronize()  # before arrays and graph go


def on_numpy() -> None:
    step = Step(np)

    def set_inputs(inputs: dict[str, np.ndarray]) -> None:
        for name, values in inputs.items():
            step.arrays[name][...] = values

    check(step, step.run, set_inputs)
    print("two plans ran twice on NumPy, in memory allocated once:")
    print(f"  {step.forward}\n  {step.backward}")


def main() -> None:
    xp, why_not = array_library()
    if why_not:
        print(f"A CUDA graph needs CuPy and a CUDA GPU: {why_not}. Nothing is captured.")
        on_numpy()
    else:
        on_gpu(xp)


if __name__ == "__main__":
    main()
