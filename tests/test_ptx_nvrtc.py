"""NVRTC's wrapper, the reading of ptxas's report, and the cache of compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ptx import Module, build, nvrtc

SOURCE = """
template <class T> __global__ void twice(T* y) {
  __shared__ T tile[32];
  tile[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[31 - threadIdx.x] + tile[threadIdx.x];
}
extern "C" __global__ void plain(int* y) { y[0] = 1; }
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* y, int n) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = y[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) y[i * n + 1] = v[95 - i] * v[i / 2];
}
"""


def test_name_expressions_find_their_kernels() -> None:
    made = nvrtc.compile_ptx(
        SOURCE, ["-arch=compute_75", "-fmad=false"], ["twice<float>", "twice<double>"]
    )
    module = Module(made.ptx, made.lowered)
    assert set(made.lowered.values()) | {"plain"} == set(module.kernel_names)
    assert module.kernel("twice<float>").translation.static_shared == 128
    assert module.kernel(made.lowered["twice<double>"]).translation.static_shared == 256
    assert module.kernel("twice<float>").translation.synchronises
    assert not module.kernel("plain").translation.synchronises


def test_resources_are_read_per_kernel() -> None:
    made = nvrtc.compile_cubin(SOURCE, ["-arch=sm_90"], ["twice<double>"])
    twice = made.resources[made.lowered["twice<double>"]]
    assert made.cubin.startswith(b"\x7fELF")
    assert twice.static_shared == 256
    assert 0 < twice.registers < 32
    assert (twice.spill_stores, twice.spill_loads, twice.stack) == (0, 0, 0)
    assert made.resources["plain"].static_shared == 0


def test_spills_are_seen() -> None:
    spill = nvrtc.compile_cubin(SPILLING, ["-arch=sm_80"]).resources["spill"]
    assert spill.spill_stores > 0
    assert spill.spill_loads > 0
    assert spill.stack > 0


def test_a_compile_error_shows_the_log() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"mine\.cu\(2\): error"):
        nvrtc.compile_ptx("\nint main( {", ["-arch=compute_75"], filename="mine.cu")


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match="install the extra 'test'"):
        nvrtc.version()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    build.compiler.cache_clear()
    try:
        with pytest.raises(build.BuildError, match=r"apt-get install g\+\+"):
            build.compiler()
    finally:
        build.compiler.cache_clear()


def test_equal_sources_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    made = nvrtc.compile_ptx(SOURCE, ["-arch=compute_75"])
    source = Module(made.ptx).kernel("plain").translation.source
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.build(source, "plain"), range(4)))
    assert len(paths) == 1
    assert os.listdir(tmp_path) == [paths.pop().name]  # no half-written file is left behind

    def no_compiler(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", no_compiler)
    build.build(source, "plain")
    with pytest.raises(AssertionError, match="compiled again"):
        build.build(source, "checked")


def test_a_kernel_is_reused_when_its_neighbours_change() -> None:
    first = nvrtc.compile_ptx(SOURCE, ["-arch=compute_75", "-fmad=false"], ["twice<float>"]).ptx
    second = nvrtc.compile_ptx(
        SOURCE, ["-arch=compute_75", "-fmad=false"], ["twice<float>", "twice<int>"]
    ).ptx
    name = "_Z5twiceIfEvPT_"
    assert first != second
    sources = [Module(ptx).kernel(name).translation.source for ptx in (first, second)]
    assert sources[0] == sources[1]
