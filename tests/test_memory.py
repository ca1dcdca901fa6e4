"""Memory beyond the outputs stays bounded, whatever the size and the layout of the inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupyops
from oracle_bits import DTYPES
from support import modulate_layouts

MIB = 2**20
ALLOWED = 16 * MIB
BIG = 256 * MIB

# (B, L, D) in float32: 256 MB each
SHAPES = {
    "batch": (64, 1024, 1024),
    "one-sample": (1, 65536, 1024),
    "one-wide-row": (1, 1, 67_108_864),
    "wide-rows": (1, 64, 1_048_576),
    "narrow": (2, 8_388_608, 4),
    "column": (1, 67_108_864, 1),
    "many-samples": (4_194_304, 4, 4),
}


def ramp(count: int, name: str) -> np.ndarray:
    """Cheap, touched memory with values that differ."""
    block = np.linspace(-2, 2, 4096).astype(DTYPES[name])
    return np.resize(block, count) if count < 4096 else np.tile(block, -(-count // 4096))[:count]


def problem(shape, name: str, parameter_shape) -> dict[str, np.ndarray]:
    values = ramp(int(np.prod(shape)), name).reshape(shape)
    parameter = ramp(int(np.prod(parameter_shape)), name).reshape(parameter_shape)
    # one array serves as x and as grad_output: the machine has to hold the inputs, too
    return {"x": values, "grad_output": values, "scale": parameter, "shift": parameter}


def results(value) -> list[np.ndarray]:
    return [part for part in (value if isinstance(value, tuple) else (value,)) if part is not None]


def assert_bounded(peak_bytes, function) -> None:
    peak, result = peak_bytes(function)
    own = sum(part.nbytes for part in results(result))
    assert peak >= own, "the measure does not see the outputs"
    assert peak - own <= ALLOWED, f"{(peak - own) / MIB:.1f} MiB beyond the outputs"


def test_the_measure_sees_a_temporary(peak_bytes):
    ones = np.ones(3 * MIB)
    peak, _ = peak_bytes(lambda: (ones + ones.copy()).sum())
    assert peak >= 24 * MIB


@pytest.mark.parametrize("layout", ["B,D", "1,1,D"])
@pytest.mark.parametrize("size", SHAPES)
def test_modulation_needs_little_beyond_its_outputs(peak_bytes, size, layout):
    shape = SHAPES[size]
    given = problem(shape, "float32", modulate_layouts(shape)[layout])
    x = given.pop("x")
    assert x.nbytes == BIG
    assert_bounded(peak_bytes, lambda: cupyops.modulate_backward(x, **given))
    given.pop("grad_output")
    assert_bounded(peak_bytes, lambda: cupyops.modulate(x, **given))


@pytest.mark.parametrize("layout", ["B,L,D", "1,L,D"])
def test_parameters_per_token_need_little_memory(peak_bytes, layout):
    shape = SHAPES["batch"]
    given = problem(shape, "float32", modulate_layouts(shape)[layout])
    x = given.pop("x")
    assert_bounded(peak_bytes, lambda: cupyops.modulate_backward(x, **given))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_other_dtypes_need_little_memory(peak_bytes, name):
    length = BIG // (64 * 1024 * DTYPES[name].itemsize)
    given = problem((64, length, 1024), name, (64, 1024))
    x = given.pop("x")
    assert x.nbytes == BIG
    assert_bounded(peak_bytes, lambda: cupyops.modulate_backward(x, **given))
    given.pop("grad_output")
    assert_bounded(peak_bytes, lambda: cupyops.modulate(x, **given, one_plus_scale=True))


@pytest.mark.parametrize("view", ["transposed", "batch-last", "fortran", "reversed"])
def test_strided_inputs_are_not_copied(peak_bytes, view):
    dense = ramp(BIG // 4, "float32")
    x = {
        "transposed": lambda: dense.reshape(64, 1024, 1024).transpose(0, 2, 1),
        "batch-last": lambda: dense.reshape(1024, 1024, 64).transpose(2, 0, 1),
        "fortran": lambda: dense.reshape(1024, 1024, 64).transpose(2, 1, 0),
        "reversed": lambda: dense.reshape(64, 1024, 1024)[::-1, ::-1, ::-1],
    }[view]()
    scale = ramp(64 * 1024, "float32").reshape(64, 1024)
    assert_bounded(peak_bytes, lambda: cupyops.modulate(x, scale=scale, shift=scale))
    assert_bounded(
        peak_bytes, lambda: cupyops.modulate_backward(x, grad_output=x, scale=scale, shift=scale)
    )


def test_large_results_lie_in_whole_huge_pages():
    """Else each costs hundreds of small pages at its ends, all of them new."""
    results = [cupyops.exp_segsum(np.zeros((9, 1024), np.float32)) for _ in range(3)]
    for result in results:
        assert result.nbytes == 36 * MIB
        assert result.ctypes.data % (2 * MIB) == 0
        assert result.flags.c_contiguous
        assert result.flags.writeable


def test_a_result_that_is_too_large_is_named():
    x = np.broadcast_to(np.zeros((), np.float32), (2**24,))  # beyond all addresses
    with pytest.raises(MemoryError, match=r"shape \(16777216, 16777216\) and data type float32"):
        cupyops.exp_segsum(x)
    x = np.broadcast_to(np.zeros((), np.float32), (1, 1, 2**61 - 1))
    with pytest.raises(MemoryError, match=r"shape \(1, 1, 2305843009213693951\)"):
        cupyops.modulate(x)


def test_results_in_place_need_little_memory(peak_bytes):
    given = problem(SHAPES["batch"], "float32", (64, 1024))
    x = given.pop("x")
    peak, _ = peak_bytes(lambda: cupyops.modulate_backward(x, **given, out=(x, None, None)))
    assert peak <= ALLOWED


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("float32", (256, 512)),
        ("float32", (64, 1024)),
        ("float32", (1, 8192)),
        ("float32", (65536, 32)),
        ("float32", (16_777_216, 2)),
        ("bfloat16", (512, 512)),
        ("float64", (128, 512)),
    ],
    ids=lambda v: v if isinstance(v, str) else "x".join(map(str, v)),
)
def test_exp_segsum_needs_little_beyond_its_outputs(peak_bytes, name, shape):
    x = np.full(shape, -0.01).astype(DTYPES[name])
    assert_bounded(peak_bytes, lambda: cupyops.exp_segsum(x))
    square = ramp(x.size * shape[-1], name).reshape(*shape, shape[-1])
    assert square.nbytes == BIG
    assert_bounded(peak_bytes, lambda: cupyops.exp_segsum_backward(square, grad_output=square))


@pytest.mark.parametrize("view", ["fortran-leading", "matrix-transposed", "matrix-axes-first"])
def test_strided_matrices_are_not_copied(peak_bytes, view):
    dense = ramp(BIG // 4, "float32")
    square = {
        "fortran-leading": lambda: dense.reshape(16, 4, 4, 512, 512).transpose(2, 1, 0, 3, 4),
        "matrix-transposed": lambda: dense.reshape(256, 512, 512).swapaxes(1, 2),
        "matrix-axes-first": lambda: dense.reshape(512, 512, 256).transpose(2, 0, 1),
    }[view]()
    assert_bounded(peak_bytes, lambda: cupyops.exp_segsum_backward(square, grad_output=square))
    peak, _ = peak_bytes(lambda: cupyops.exp_segsum(square[..., 0] * 0, out=square))
    assert peak <= ALLOWED + square[..., 0].nbytes


def test_a_strided_sequence_is_not_copied(peak_bytes):
    x = np.zeros((2, 33_554_432), np.float32).T  # 256 MB, leading axis of unit stride
    out = np.empty((33_554_432, 2, 2), np.float32)
    peak, _ = peak_bytes(lambda: cupyops.exp_segsum(x, out=out))
    assert peak <= ALLOWED
    assert (out[::1_000_003] == np.tri(2)).all()


RESIDENT = """
import resource, numpy as np, cupyops
big = np.full({shape}, 0.5, np.float32)
out = np.full({out}, 0.5, np.float32)
row = np.full({row}, 0.5, np.float32)
cupyops.modulate(np.ones((1, 1, 1), np.float32))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{call}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("shape", "out", "row", "call"),
    [
        ((64, 1024, 512), None, (64, 512), "modulate(big, scale=row, shift=row, out=out)"),
        (
            *((64, 1024, 512), None, (512,)),
            "modulate_backward(big, grad_output=big, scale=row, shift=row, out=(out, None, None))",
        ),
        ((128, 512), (128, 512, 512), 1, "exp_segsum(big, out=out)"),
        ((128, 512, 512), (128, 512), 1, "exp_segsum_backward(big, grad_output=big, out=out)"),
    ],
    ids=["modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"],
)
def test_the_process_does_not_grow(shape, out, row, call):
    """What an allocator hides from the measure above (kept scratch, thread stacks) shows here."""
    code = RESIDENT.format(shape=shape, out=out or shape, row=row, call=f"cupyops.{call}")
    root = str(Path(cupyops.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    kib = int(done.stdout) / (1024 if sys.platform == "darwin" else 1)
    assert kib <= 16 * 1024, f"{kib / 1024:.1f} MiB"
