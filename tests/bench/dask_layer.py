"""What the Dask layer costs beside plain calls, and what a second process gains.

    python tests/bench/dask_layer.py

One process: eight chunks of 64 MB along B, medians of alternating rounds. "loop" calls the function
on the chunks one after another, "whole" on the undivided array. The same with next to nothing in
the chunks. Processes: workers of one thread, with the data in their memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

sys.path[:1] = [str(Path(__file__).resolve().parents[2])]

import cupyops  # noqa: E402
from cupyops.cli.measure import settle_allocator  # noqa: E402

B, L, D = 8, 16384, 1024
ROUNDS = 15


def medians(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(values)) for name, values in seconds.items()}


def one_process() -> None:
    settle_allocator()
    x = np.random.default_rng(0).standard_normal((B, L, D), np.float32)
    grad = x[::-1].copy()
    lazy, lazy_grad = (da.from_array(array, chunks=(1, L, D)) for array in (x, grad))
    print(f"{'ms':<26} {'loop':>7} {'whole':>7} {'1 thread':>9} {'2 threads':>9}")
    for form, shape in (("(B, D)", (B, D)), ("(D,)", (D,))):
        scale = np.full(shape, 0.5, np.float32)

        def forward(x: Any, _grad: Any, scale: Any) -> tuple[Any, ...]:
            return (cupyops.modulate(x, scale=scale, shift=scale),)

        def backward(x: Any, grad: Any, scale: Any) -> tuple[Any, ...]:
            return cupyops.modulate_backward(x, grad_output=grad, scale=scale, shift=scale)

        def loop(function: Any, scale: Any) -> None:
            for b in range(B):
                own = scale[b : b + 1] if scale.ndim == 2 else scale
                function(x[b : b + 1], grad[b : b + 1], own)

        def in_chunks(function: Any, scale: Any, **scheduler: Any) -> None:
            dask.persist(*function(lazy, lazy_grad, scale), **scheduler)

        for function in (forward, backward):
            found = medians(
                {
                    "loop": partial(loop, function, scale),
                    "whole": partial(function, x, grad, scale),
                    "one": partial(in_chunks, function, scale, scheduler="sync"),
                    "two": partial(in_chunks, function, scale, scheduler="threads", num_workers=2),
                }
            )
            numbers = " ".join(f"{value:8.1f}" for value in found.values())
            print(f"{function.__name__ + ' ' + form:<24} {numbers}")


def cluster_of(workers: int) -> LocalCluster:
    return LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)


def little_work() -> None:
    """Calls of eight chunks that hold next to nothing: what the graph and its tasks cost."""
    x = np.ones((8, 64, 64), np.float32)
    new_value = count(1)

    def forward(x: Any) -> Any:
        return dask.persist(cupyops.modulate(x, scale=np.full((8, 64), next(new_value), x.dtype)))

    def backward(x: Any) -> Any:
        scale = np.full((8, 64), next(new_value), x.dtype)
        return dask.persist(*cupyops.modulate_backward(x, grad_output=x, scale=scale)[:2])

    functions = {"forward": forward, "backward": backward}
    lazy = da.from_array(x, chunks=(1, 64, 64))
    for scheduler in ("sync", "threads"):
        with dask.config.set(scheduler=scheduler, num_workers=2):
            report_calls(scheduler, {n: partial(f, lazy) for n, f in functions.items()})
    with cluster_of(1) as cluster, Client(cluster):
        held = lazy.persist()
        wait(held)
        runs = {n: partial(lambda f: wait(f(held)), f) for n, f in functions.items()}
        report_calls("distributed, one worker", runs)


def report_calls(name: str, runs: dict[str, Callable[[], Any]]) -> None:
    figures = ", ".join(f"{key} {value:.1f} ms" for key, value in medians(runs).items())
    print(f"eight chunks with little work, {name}: {figures}")


def processes(workers: int) -> dict[str, float]:
    found = {}
    with cluster_of(workers) as cluster, Client(cluster):
        for dtype in ("float16", "float32"):
            rng = da.random.default_rng(0)
            shape, chunks = (16, 8192, 1024), (1, 8192, 1024)
            x = rng.standard_normal(shape, dtype=np.float32, chunks=chunks)
            x = x.astype(dtype).persist()
            wait(x)

            new_value = count(1)  # or the results of the round before would be taken

            def backward(x: Any = x, new_value: Any = new_value) -> None:
                scale = np.full((x.shape[0], x.shape[2]), next(new_value), x.dtype)
                grads = cupyops.modulate_backward(x, grad_output=x, scale=scale)
                wait(dask.persist(*grads[:2]))

            found[f"modulate_backward {dtype}"] = medians({"ms": backward})["ms"]
    return found


def main() -> None:
    one_process()
    little_work()
    one, two = (processes(workers) for workers in (1, 2))
    for name, milliseconds in one.items():
        gain = milliseconds / two[name]
        print(f"{name}: {milliseconds:.0f} ms in one process, {two[name]:.0f} in two: {gain:.2f}")


if __name__ == "__main__":
    main()
