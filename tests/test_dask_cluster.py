"""Dask arrays on two worker processes: results, a worker that dies, more data than memory."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import zarr
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, wait

import cupyops
from cupyops._modulate_rows import CHUNK_ROWS
from support import (
    DTYPE_NAMES,
    assert_same_bits,
    assert_same_gradients,
    modulation_problem,
    sequence,
)

MEMORY_LIMIT = "400 MiB"  # of each worker, which needs 130 MiB for its modules


@pytest.fixture(scope="module")
def client():
    cluster = LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        memory_limit=MEMORY_LIMIT,
        dashboard_address=None,
    )
    with cluster, Client(cluster) as connected:
        yield connected


def gathered(client: Client, grads) -> cupyops.ModulateGrads:
    return cupyops.ModulateGrads(*client.gather(client.compute(list(grads))))


def lazy(problem: dict, chunks) -> dict:
    shape = problem["x"].shape
    return {
        key: da.from_array(value, chunks=chunks) if value.shape == shape else value
        for key, value in problem.items()
    }


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_two_processes_have_the_bits_of_one(client, dtype):
    rng = np.random.default_rng(0)
    for layouts in (("B,D", "D"), ("1,L,D", "B,L,D")):
        problem = modulation_problem(rng, (4, 300, 20), dtype, *layouts)
        borders = (4, 64, 20) if "1,L,D" in layouts else (1, 64, 10)
        arrays = lazy(problem, borders)
        # Finer chunks than those of x, so that chunks have to travel.
        arrays["grad_output"] = arrays["grad_output"].rechunk((1, 50, 20))
        grads = cupyops.modulate_backward(arrays.pop("x"), **arrays)
        x = problem.pop("x")
        assert_same_gradients(gathered(client, grads), cupyops.modulate_backward(x, **problem))
    x = sequence(rng, (6, 50), dtype, "decay")
    y = cupyops.exp_segsum(da.from_array(x, chunks=(1, -1)))
    grad = cupyops.exp_segsum_backward(y, grad_output=y)
    assert_same_bits(y.compute(), cupyops.exp_segsum(x))
    whole = cupyops.exp_segsum(x)
    assert_same_bits(grad.compute(), cupyops.exp_segsum_backward(whole, grad_output=whole))


def slow_rows(block, block_info=None):
    time.sleep(0.02)
    first = block_info[None]["array-location"][1][0]
    return np.sin(np.arange(first, first + block.shape[1], dtype=np.float32))[None, :, None] + block


def test_a_killed_worker_costs_time_and_nothing_else(client):
    before = client.run(os.getpid)
    shape, chunks = (1, CHUNK_ROWS * 100, 16), (1, CHUNK_ROWS, 16)
    x = da.ones(shape, dtype=np.float32, chunks=chunks).map_blocks(slow_rows, dtype=np.float32)
    scale = np.full((1, 16), 0.5, np.float32)
    grads = cupyops.modulate_backward(x, grad_output=x, scale=scale, shift=scale)
    grads = cupyops.ModulateGrads(*client.persist(list(grads)))
    deadline = time.monotonic() + 60
    while True:  # until the worker that is to die holds results
        held = client.has_what()
        victim = next((w for w, keys in held.items() if len(keys) > 20), None)
        if victim is not None:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(before[victim], signal.SIGKILL)
    got = gathered(client, grads)
    values = np.sin(np.arange(shape[1], dtype=np.float32))[None, :, None] + np.ones(
        shape, np.float32
    )
    assert_same_gradients(
        got, cupyops.modulate_backward(values, grad_output=values, scale=scale, shift=scale)
    )
    client.wait_for_workers(2, timeout=60)
    assert before[victim] not in client.run(os.getpid).values()


def peak_of_process() -> int:
    """Bytes; not getrusage's, which start from those of the process that started this one."""
    (peak,) = re.findall(
        r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return 1024 * int(peak)


def test_an_array_beyond_the_workers_memory_goes_from_file_to_file(client, tmp_path):
    limit = parse_bytes(MEMORY_LIMIT)
    chunks = (1, 16 * CHUNK_ROWS, 1024)  # 4 MiB
    shape = (1, 16 * CHUNK_ROWS * 220, 1024)
    source = zarr.create_array(
        tmp_path / "x.zarr", shape=shape, chunks=chunks, dtype=np.float32, compressors=None
    )
    assert source.nbytes > 2 * limit
    rng = np.random.default_rng(1)
    period = rng.standard_normal(chunks, np.float32)
    for number in range(220):
        rows = slice(number * chunks[1], (number + 1) * chunks[1])
        source[:, rows] = period * np.float32(1 + number % 7)
    x = da.from_zarr(tmp_path / "x.zarr")
    assert x.chunksize == chunks
    scale = np.full((1, 1024), 3, np.float32)
    grads = cupyops.modulate_backward(x, grad_output=x, scale=scale, shift=scale)
    stored = grads.grad_input.to_zarr(tmp_path / "grad.zarr", compute=False)
    futures = client.compute([stored, grads.grad_scale, grads.grad_shift])
    wait(futures)
    _, grad_scale, grad_shift = client.gather(futures)
    written = zarr.open_array(tmp_path / "grad.zarr", mode="r")
    for number in (0, 5, 219):
        rows = slice(number * chunks[1], (number + 1) * chunks[1])
        assert_same_bits(written[:, rows], period * np.float32(1 + number % 7) * np.float32(3))
    # In the contract's order.
    total = np.full((2, 1024), -0.0)
    for number in range(220):
        part = period * np.float32(1 + number % 7)
        for first in range(0, chunks[1], CHUNK_ROWS):
            piece = part[:, first : first + CHUNK_ROWS]
            alone = cupyops.modulate_backward(piece, grad_output=piece, scale=scale, shift=scale)
            total += np.concatenate([alone.grad_scale, alone.grad_shift])
    assert_same_bits(grad_scale[0], total[0].astype(np.float32))
    assert_same_bits(grad_shift[0], total[1].astype(np.float32))
    for peak in client.run(peak_of_process).values():
        assert peak < limit, peak
