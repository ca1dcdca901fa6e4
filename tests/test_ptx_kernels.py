"""Realistic kernels, through NVRTC for both targets, against NumPy bit for bit."""

from __future__ import annotations

import functools
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx import Executor, Memory, Module, memory, nvrtc

OPTIONS = ("--std=c++17", "-fmad=false", "-lineinfo", "-ftz=true")
TARGETS = (75, 90)

SOURCE = r"""
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
struct half_t { u16 bits; };
struct bfloat_t { u16 bits; };

// CuPy's -ftz=true makes a * b flush subnormals; inline PTX without .ftz does not.
__device__ float mul(float a, float b) {
  float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
__device__ float add(float a, float b) {
  float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
__device__ double mul(double a, double b) { return a * b; }
__device__ double add(double a, double b) { return a + b; }
__device__ double widen(float a) {
  double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(a)); return r;
}
__device__ double widen(double a) { return a; }
__device__ float narrow(double a) {
  float r; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(a)); return r;
}

template <class T> struct traits { typedef float compute; };
template <> struct traits<double> { typedef double compute; };
__device__ float get(half_t h) {
  float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h.bits)); return r;
}
__device__ float get(bfloat_t h) { return __uint_as_float((u32)h.bits << 16); }
__device__ float get(float v) { return v; }
__device__ double get(double v) { return v; }
__device__ void put(half_t& h, float v) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v)); }
__device__ void put(bfloat_t& h, float v) {
  u32 b = __float_as_uint(v);
  bool nan = (b & 0x7fffffffu) > 0x7f800000u;
  h.bits = nan ? 0x7fc0 : (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
}
__device__ void put(float& h, float v) { h = v; }
__device__ void put(double& h, double v) { h = v; }

template <class T, int N> struct alignas(N * sizeof(T)) Pack { T v[N]; };

// Block (32, 8): 32 groups of N columns, 8 rows at a time; row l goes to accumulator l mod 8.
template <class T, int N>
__global__ void rows(const T* __restrict__ x, const T* __restrict__ g, const T* __restrict__ scale,
                     T* grad_x, double* partial, i64 L, i64 D, i64 x_stride, int one_plus) {
  typedef typename traits<T>::compute C;
  extern __shared__ __align__(16) unsigned char raw[];
  C* sums = (C*)raw;
  const i64 column = ((i64)blockIdx.x * 32 + threadIdx.x) * N, b = blockIdx.y;
  C sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = C(-0.0);
  if (column < D) {
    const Pack<T, N> s = *(const Pack<T, N>*)(scale + b * D + column);
    for (i64 l = threadIdx.y; l < L; l += 8) {
      const i64 row = b * L + l;
      const Pack<T, N> vx = *(const Pack<T, N>*)(x + row * x_stride + column);
      const Pack<T, N> vg = *(const Pack<T, N>*)(g + row * D + column);
      Pack<T, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        C f = get(s.v[i]);
        if (one_plus) f = add(C(1), f);
        put(out.v[i], mul(get(vg.v[i]), f));
        sum[i] = add(sum[i], mul(get(vg.v[i]), get(vx.v[i])));
      }
      *(Pack<T, N>*)(grad_x + row * D + column) = out;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) sums[(threadIdx.y * 32 + threadIdx.x) * N + i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * N; c += 256) {
    const i64 to = (i64)blockIdx.x * 32 * N + c;
    if (to >= D) continue;
    C total = sums[c];
#pragma unroll
    for (int k = 1; k < 8; ++k) total = add(total, sums[k * 32 * N + c]);
    partial[b * D + to] = widen(total);
  }
}

// A warp per row: butterfly sum, ballot of the positive ones.
template <class T>
__global__ void row_sums(const T* x, float* sums, int* positive, int D) {
  const int lane = threadIdx.x % 32;
  const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  float sum = 0;
  int count = 0;
  for (int c = 0; c < D; c += 32) {
    const float v = c + lane < D ? get(x[row * D + c + lane]) : 0.0f;
    count += __popc(__ballot_sync(0xffffffffu, v > 0.0f));
    sum = add(sum, v);
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  if (lane == 0) { sums[row] = sum; positive[row] = count; }
}

// 64-bit index arithmetic with divisions, over a grid of any size.
__global__ void transpose(const u16* x, u16* y, i64 rows, i64 columns) {
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * columns; i += step)
    y[i % columns * rows + i / columns] = x[i];
}
"""

NAMES = [
    "rows<float, 4>", "rows<half_t, 8>", "rows<bfloat_t, 8>", "rows<double, 2>",
    "rows<float, 1>", "rows<half_t, 1>", "rows<bfloat_t, 1>", "rows<double, 1>",
    "row_sums<float>", "row_sums<half_t>", "transpose",
]  # fmt: skip
TYPES = {
    "float": np.float32,
    "half_t": np.float16,
    "bfloat_t": ml_dtypes.bfloat16,
    "double": np.float64,
}


@functools.cache
def module(target: int) -> Module:
    made = nvrtc.compile_ptx(SOURCE, [*OPTIONS, f"-arch=compute_{target}"], NAMES)
    return Module(made.ptx, made.lowered)


def special(shape: Any, dtype: Any, seed: int) -> np.ndarray:
    """Random numbers with subnormals, zeros of both signs, infinities and NaN among them."""
    random = np.random.default_rng(seed)
    made = random.standard_normal(shape)
    tiny = {"float32": 1e-39, "float16": 3e-7, "bfloat16": 1e-39, "float64": 1e-310}
    values = [0.0, -0.0, tiny[np.dtype(dtype).name], -tiny[np.dtype(dtype).name], np.inf, np.nan]
    where = random.random(shape)
    for index, value in enumerate(values):
        made[(where >= index * 0.004) & (where < (index + 1) * 0.004)] = value
    return memory.copy(made.astype(dtype))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, all NaNs being one."""
    nan_a, nan_b = np.isnan(a.astype(np.float64)), np.isnan(b.astype(np.float64))
    bits = f"u{a.itemsize}"
    equal = (a.view(bits) == b.view(bits)) | (nan_a & nan_b)
    return a.dtype == b.dtype and bool(equal.all())


def expected_rows(x: Any, g: Any, scale: Any, one_plus: bool) -> tuple[np.ndarray, np.ndarray]:
    compute = np.float64 if x.dtype == np.float64 else np.float32
    xs, gs, s = (v.astype(compute) for v in (x, g, scale))
    with np.errstate(all="ignore"):
        factor = compute(1) + s if one_plus else s
        grad = (gs * factor[:, None]).astype(x.dtype)
        sums = np.full((8, x.shape[0], x.shape[2]), -0.0, compute)
        for row in range(x.shape[1]):
            sums[row % 8] += gs[:, row] * xs[:, row]
        total = sums[0]
        for k in range(1, 8):
            total = total + sums[k]
    return grad, total.astype(np.float64)


class Rows:
    """The data of one call of ``rows`` and its launch."""

    def __init__(self, kind: str, vector: int, shape: tuple[int, int, int], one_plus: bool) -> None:
        dtype = TYPES[kind]
        self.name, self.vector, self.one_plus = f"rows<{kind}, {vector}>", vector, one_plus
        self.x, self.g = special(shape, dtype, 1), special(shape, dtype, 2)
        self.scale = special((shape[0], shape[2]), dtype, 3)

    def run(self, target: int, **keywords: Any) -> Any:
        batch, length, width = self.x.shape
        mem = Memory()
        self.grad = memory.empty(self.x.shape, self.x.dtype)
        self.partial = memory.empty((batch, width), np.float64)
        args = [
            mem.register(self.x, "x", readonly=True),
            mem.register(self.g, "grad_output", readonly=True),
            mem.register(self.scale, "scale", readonly=True),
            mem.register(self.grad, "grad_input", poison=True),
            mem.register(self.partial, "partial", poison=True),
            *(np.int64(n) for n in (length, width, width)),
            np.int32(self.one_plus),
        ]
        compute = 8 if self.x.dtype == np.float64 else 4
        report = Executor(mem, **keywords).launch(
            module(target),
            self.name,
            grid=(-(-width // (32 * self.vector)), batch),
            block=(32, 8),
            args=args,
            shared_bytes=256 * self.vector * compute,
        )
        if keywords.get("checks"):
            mem.check_written("grad_input", "partial")
        return report

    def check(self) -> None:
        grad, partial = expected_rows(self.x, self.g, self.scale, self.one_plus)
        assert same_bits(self.grad, grad)
        assert same_bits(self.partial, partial)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("checks", [(), "all"], ids=["plain", "checked"])
def test_rows_give_the_bits_of_numpy(target: int, one_plus: bool, kind: str, checks: Any) -> None:
    vector = 16 // np.dtype(TYPES[kind]).itemsize
    for width, lanes in ((37 * vector, vector), (101, 1)):
        case = Rows(kind, lanes, (2, 13, width), one_plus)
        case.run(target, checks=checks)
        case.check()


@pytest.mark.parametrize("target", TARGETS)
def test_no_order_changes_a_bit(target: int) -> None:
    case = Rows("half_t", 8, (3, 40, 512), True)
    orders = [("forward", 0), ("reversed", 0), *(("shuffled", seed) for seed in range(4))]
    for checks in ((), ("memcheck", "initcheck", "racecheck")):
        for order, seed in orders:
            case.run(target, checks=checks, order=order, seed=seed)
            case.check()


@pytest.mark.parametrize("target", TARGETS)
def test_traffic_of_rows_is_what_the_arrays_hold(target: int) -> None:
    case = Rows("float", 4, (2, 24, 256), False)
    report = case.run(target, checks=("traffic",))
    buffers = report.buffers
    assert buffers["x"].read_sectors == buffers["x"].read_requests == case.x.nbytes // 32
    assert buffers["grad_input"].write_sectors == case.grad.nbytes // 32
    assert buffers["partial"].write_sectors == case.partial.nbytes // 32
    # Every one of the eight warps reads the row of scale; the block needs it once.
    assert buffers["scale"].read_sectors == case.scale.nbytes // 32
    assert buffers["scale"].read_requests == 8 * case.scale.nbytes // 32
    assert report.total.read_requests == sum(b.read_requests for b in buffers.values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["float", "half_t"])
@pytest.mark.parametrize("checks", [(), "all"], ids=["plain", "checked"])
def test_warp_sums(target: int, kind: str, checks: Any) -> None:
    random = np.random.default_rng(0)
    x = memory.copy(random.standard_normal((8, 75)).astype(TYPES[kind]))
    sums, positive = memory.empty(8, np.float32), memory.empty(8, np.int32)
    mem = Memory()
    args = [
        mem.register(x, "x", readonly=True),
        mem.register(sums, "sums", poison=True),
        mem.register(positive, "positive", poison=True),
        np.int32(75),
    ]
    executor = Executor(mem, checks=checks, order="shuffled")
    executor.launch(module(target), f"row_sums<{kind}>", grid=(2,), block=(128,), args=args)
    padded = np.zeros((8, 96), np.float32)
    padded[:, :75] = x
    lanes = np.zeros((8, 32), np.float32)
    for start in range(0, 96, 32):
        lanes = lanes + padded[:, start : start + 32]
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, np.arange(32) ^ step]
    assert sums.tobytes() == np.ascontiguousarray(lanes[:, 0]).tobytes()
    assert positive.tolist() == (padded > 0).sum(axis=1).tolist()


@pytest.mark.parametrize("target", TARGETS)
def test_transpose_with_64_bit_divisions(target: int) -> None:
    x = memory.copy(np.arange(7 * 130, dtype=np.uint16).reshape(7, 130))
    y = memory.empty((130, 7), np.uint16)
    mem = Memory()
    args = [mem.register(x, "x", readonly=True), mem.register(y, "y", poison=True)]
    args += [np.int64(7), np.int64(130)]
    Executor(mem, checks="all").launch(
        module(target), "transpose", grid=(3,), block=(64,), args=args
    )
    mem.check_written("y")
    assert np.array_equal(y, x.T)


def test_a_million_elements_take_no_time() -> None:
    """Generous limits: they guard against a change of kind, not against a busy machine."""
    case = Rows("half_t", 8, (2, 512, 1024), True)
    for checks, limit in (((), 0.3), ("all", 6.0)):
        case.run(75, checks=checks)  # compiles
        start = time.perf_counter()
        case.run(75, checks=checks)
        assert time.perf_counter() - start < limit
    case.check()
