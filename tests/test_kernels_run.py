"""Every kernel instance, run from its PTX on the CPU: bits, accesses, orders, offsets, traffic.

The contract tests already run on the simulated GPU (the `xp` fixture). Here is what only a view
from inside shows: that every instance is reached, on both PTX targets, that no access is out of
place, that nothing depends on the order of blocks and threads or on what a workspace holds.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyops
import simulated
import traffic
from cupyops import _exp_segsum, _kernels, _launch, _modulate, _plan
from cupyops._arrays import ArraySpec
from cupyops._modulate_rows import CHUNK_ROWS
from ptx import Executor, Memory, memory, nvrtc
from simulated import SOURCES, TARGETS, GpuArray, SimulatedExecutor, instances, plan_of, run_checked
from support import (
    DTYPE_NAMES,
    LAYOUT_NAMES,
    array,
    assert_exp_segsum,
    assert_exp_segsum_backward,
    bits,
    gradient_pair,
    modulate_layouts,
    modulation_problem,
    sequence,
    shape_id,
)

MODULATE, MODULATE_BACKWARD = _modulate._MODULATE, _modulate._MODULATE_BACKWARD
EXP_SEGSUM, EXP_SEGSUM_BACKWARD = _exp_segsum._EXP_SEGSUM, _exp_segsum._EXP_SEGSUM_BACKWARD


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, target: str) -> SimulatedExecutor:
    executor = SimulatedExecutor(target)
    simulated.install(monkeypatch, executor)
    return executor


def on_device(values: np.ndarray | None) -> GpuArray | None:
    return None if values is None else GpuArray(memory.copy(values))


def same_bits(got: Any, want: np.ndarray | None) -> bool:
    if got is None or want is None:
        return got is want
    got = got.values if isinstance(got, GpuArray) else got
    nan = np.isnan(got) & np.isnan(want)
    return got.dtype == want.dtype and bool(np.all((bits(got) == bits(want)) | nan))


# -- every instance, with the bits of NumPy -----------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_modulation_instance_gives_the_bits_of_numpy(
    gpu: SimulatedExecutor, name: str
) -> None:
    rng = np.random.default_rng(5)
    # Two chunks, so that partial sums are combined; a width for vectors and one for scalars.
    for parameter, width in itertools.product(DTYPE_NAMES, (24, 7)):
        problem = modulation_problem(rng, (2, 67, width), name, "B,D", "D", parameter)
        x, grad, scale, shift = (problem[k] for k in ("x", "grad_output", "scale", "shift"))
        device = [on_device(a) for a in (x, grad, scale, shift)]
        for plus in (False, True):
            want = cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=plus)
            got = cupyops.modulate(device[0], scale=device[2], shift=device[3], one_plus_scale=plus)
            assert same_bits(got, want)
            wants = cupyops.modulate_backward(
                x, grad_output=grad, scale=scale, shift=shift, one_plus_scale=plus
            )
            gots = cupyops.modulate_backward(
                device[0],
                grad_output=device[1],
                scale=device[2],
                shift=device[3],
                one_plus_scale=plus,
            )
            assert all(same_bits(g, w) for g, w in zip(gots, wants, strict=True))
    x_type = _launch.C_TYPES[name]
    expected = {
        instance
        for source in ("modulate.cu", "modulate_backward.cu")
        for instance in instances(source)
        if f"<{x_type}, " in instance and "combine" not in instance
    }
    assert expected <= {launch.kernel.name for launch in gpu.launched}


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_segment_sum_instance_is_within_the_error_bound(
    gpu: SimulatedExecutor, name: str
) -> None:
    rng = np.random.default_rng(6)
    # 24 and 7 for vectors and scalars; the last is cut into tiles.
    for length in (24, 7, 33):
        x = sequence(rng, (3, length), name, "decay")
        assert_exp_segsum(cupyops.exp_segsum(on_device(x)).values, x)
    for length in (24, 7, 33, 328):
        y, grad = gradient_pair(rng, (1, length, length), name)
        got = cupyops.exp_segsum_backward(on_device(y), grad_output=on_device(grad))
        positions = None if length < 100 else (0, 1, 31, length // 2, length - 1)
        assert_exp_segsum_backward(got.values, y, grad, positions)
    launched = {launch.kernel.name for launch in gpu.launched}
    suffix = f"<{_launch.C_TYPES[name]}"
    sources = (source for source in SOURCES if source.startswith("exp_segsum"))
    expected = {i for s in sources for i in instances(s) if re.search(rf"{suffix}[,>]", i)}
    assert expected == {name for name in launched if suffix in name}


def simulated_dtype(name: str) -> np.dtype:
    return array([0.0], name).dtype


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_combining_instance_is_run(gpu: SimulatedExecutor, name: str) -> None:
    x = np.ones((1, 130, 3), simulated_dtype(name))
    for parameter in DTYPE_NAMES:
        scale = np.ones((1, 3), simulated_dtype(parameter))
        got = cupyops.modulate_backward(
            on_device(x), grad_output=on_device(x), scale=on_device(scale)
        )
        assert np.all(got.grad_scale.values == np.asarray(130, scale.dtype))
    length = 321  # the least that is cut into tiles
    y = np.zeros((1, length, length), simulated_dtype(name))
    y[0, -1, 0] = 1
    got = cupyops.exp_segsum_backward(on_device(y), grad_output=on_device(y)).values
    assert np.all(got[0, 1:] == 1)
    assert got[0, 0] == 0
    assert gpu.launched[-1].kernel.name.startswith("exp_segsum_backward_combine")


# -- every access -------------------------------------------------------------------------------


class Case(NamedTuple):
    """An operator with inputs whose launches are worth watching."""

    label: str
    operator: _plan.Operator
    inputs: dict[str, np.ndarray]
    options: tuple[Any, ...] = ()
    unread: dict[str, np.ndarray] | None = None


def cases(name: str) -> Iterator[Case]:
    rng = np.random.default_rng(7)
    layouts = [("B,D", "B,D"), ("D", "D"), ("B,L,D", "B,L,D"), ("1,L,D", "B,D"), (None, "1,1,D")]
    for shape, (scale, shift) in itertools.product([(3, 70, 40), (2, 5, 9)], layouts):
        problem = modulation_problem(rng, shape, name, scale, shift)
        forward = {k: v for k, v in problem.items() if k != "grad_output"}
        label = f"{shape_id(shape)}-{scale}-{shift}"
        yield Case(f"modulate-{label}", MODULATE, forward, (True,))
        # The values of shift are not for the kernel: all of them are forbidden.
        unread = {"shift": np.ones(problem["shift"].shape, bool)}
        yield Case(f"modulate_backward-{label}", MODULATE_BACKWARD, problem, (True,), unread)
    for length in (1, 8, 33, 64, 140, 328):
        x = sequence(rng, (3, length), name, "decay")
        yield Case(f"exp_segsum-{length}", EXP_SEGSUM, {"x": x})
        y, grad = gradient_pair(rng, (3, length, length), name)
        above = np.broadcast_to(np.triu(np.ones((length, length), bool)), y.shape)
        inputs = {"y": y, "grad_output": grad}
        yield Case(
            f"exp_segsum_backward-{length}",
            EXP_SEGSUM_BACKWARD,
            inputs,
            unread={"y": above, "grad_output": above},
        )


def checked(case: Case, **options: Any) -> dict[str, np.ndarray]:
    inputs = {key: memory.copy(value) for key, value in case.inputs.items()}
    plan = plan_of(case.operator, inputs, None, *case.options)
    outs = simulated.new_outs(plan)
    run_checked(plan, inputs, outs, unread=case.unread, **options)
    for key, value in case.inputs.items():
        assert same_bits(inputs[key], value), f"{key} was changed"
    return outs


CHECKED = [(TARGETS[0], name) for name in DTYPE_NAMES] + [(TARGETS[1], "bfloat16")]


@pytest.mark.parametrize(("target", "name"), CHECKED)
def test_no_access_is_out_of_place_unwritten_or_racing(target: str, name: str) -> None:
    for case in cases(name):
        first = checked(case, target=target)
        for order, seed in (("reversed", 0), ("shuffled", 1)):
            again = checked(case, target=target, order=order, seed=seed)
            assert all(same_bits(again[k], first[k]) for k in first), (case.label, order)


def test_a_workspace_may_start_anywhere_and_hold_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated.install(monkeypatch, SimulatedExecutor())
    rng = np.random.default_rng(8)
    problem = modulation_problem(rng, (2, 130, 12), "float32", "B,D", "D")
    device = {key: on_device(value) for key, value in problem.items()}
    x = device.pop("x")
    plan = cupyops.plan_modulate_backward(x, **device)
    long = on_device(np.ones((1, 1100, 1100), np.float32))
    back = cupyops.plan_exp_segsum_backward(long, grad_output=long)
    for planned, call in (
        (plan, lambda **more: plan.run(x, **device, **more)),
        (back, lambda **more: (back.run(long, grad_output=long, **more),)),
    ):
        assert planned.workspace_size > 0
        want = call()
        for offset, fill in itertools.product(range(16), (0x00, 0xFF)):
            size = planned.workspace_size + (offset % 3)
            workspace = memory.empty(size, np.uint8, offset=offset)
            workspace[:] = fill
            got = call(workspace=GpuArray(workspace))
            assert all(same_bits(g, w.values) for g, w in zip(got, want, strict=True))
        small = GpuArray(memory.empty(planned.workspace_size - 1, np.uint8))
        with pytest.raises(ValueError, match=r"workspace has .* bytes; expected at least"):
            call(workspace=small)


def test_a_workspace_is_used_to_its_size_and_no_further() -> None:
    """With the exact size at every alignment, no access is outside (memcheck)."""
    rng = np.random.default_rng(9)
    problem = modulation_problem(rng, (2, 130, 12), "float64", "B,D", "D")
    case = Case("workspace", MODULATE_BACKWARD, problem, (False,))
    for offset in (0, 1, 8, 15):
        checked(case, workspace_offset=offset)


# -- strides and offsets ------------------------------------------------------------------------


def with_strides(values: np.ndarray, strides: tuple[int, ...]) -> ArraySpec:
    return ArraySpec._make((values.shape, values.dtype, strides, simulated.LIBRARY, "simulated:0"))


HUGE = (2**37 + 128, 2**35 + 64, 2**32 + 32)
"""Strides in bytes whose products with small indices pass 2^32, as offsets in elements too."""


def test_offsets_are_64_bit_in_the_modulation_pair() -> None:
    rng = np.random.default_rng(10)
    problem = modulation_problem(rng, (3, 5, 16), "bfloat16", "B,D", "B,L,D")
    wants = {
        MODULATE: cupyops.modulate(problem["x"], scale=problem["scale"], shift=problem["shift"]),
        MODULATE_BACKWARD: cupyops.modulate_backward(
            problem["x"],
            grad_output=problem["grad_output"],
            scale=problem["scale"],
            shift=problem["shift"],
        ),
    }
    for operator, want in wants.items():
        given = {k: v for k, v in problem.items() if k in operator.inputs}
        results = want if isinstance(want, tuple) else (want,)
        outs = {o: np.zeros_like(w) for o, w in zip(operator.outputs, results, strict=True)}
        run_sparse(operator, given, outs, False)
        for name, result in zip(operator.outputs, results, strict=True):
            assert same_bits(outs[name], result), name


def test_offsets_are_64_bit_in_the_segment_sums() -> None:
    rng = np.random.default_rng(11)
    x = sequence(rng, (2, 3, 8), "float32", "decay")
    y = np.zeros((2, 3, 8, 8), np.float32)
    run_sparse(EXP_SEGSUM, {"x": x}, {"out": y})
    assert_exp_segsum(y, x)
    grad, out = np.ones_like(y), np.zeros_like(x)
    run_sparse(EXP_SEGSUM_BACKWARD, {"y": y, "grad_output": grad}, {"out": out})
    assert_exp_segsum_backward(out, y, grad)


def run_sparse(
    operator: _plan.Operator,
    inputs: dict[str, np.ndarray],
    outs: dict[str, np.ndarray],
    *options: Any,
) -> None:
    """Run on arrays that are spread over terabytes of made-up addresses."""
    mem = Memory()
    specs: dict[str, ArraySpec] = {}
    addresses: dict[str, int] = {}
    for place, (name, values) in enumerate({**inputs, **outs}.items()):
        strides = (*HUGE[len(HUGE) + 1 - values.ndim :], values.itemsize)
        specs[name] = with_strides(values, strides)
        addresses[name] = mem.register_sparse(
            values,
            name,
            base=(place + 1) << 40,
            strides=strides,
            readonly=name in inputs,
            poison=name in outs,
        )
    plan = plan_of(operator, {n: specs[n] for n in inputs}, {n: specs[n] for n in outs}, *options)
    workspace = memory.empty(plan.workspace_size, np.uint8)
    base = mem.register(workspace, "workspace", poison=True)
    executor = Executor(mem, checks=("memcheck", "initcheck"))
    simulated.launch_all(executor, plan.launches, addresses, base, TARGETS[0])
    mem.check_written(*outs)


def test_more_tiles_than_the_grid_holds_are_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SimulatedExecutor()
    simulated.install(monkeypatch, executor)
    monkeypatch.setattr(_launch, "MAX_GRID", 3)
    rng = np.random.default_rng(12)
    problem = modulation_problem(rng, (150, 70, 9), "float32", "B,D", "D")
    device = {key: on_device(value) for key, value in problem.items()}
    x = device.pop("x")
    first = problem.pop("x")
    wants = cupyops.modulate_backward(first, **problem)
    gots = cupyops.modulate_backward(x, **device)
    assert all(same_bits(g, w) for g, w in zip(gots, wants, strict=True))
    forward = {k: v for k, v in problem.items() if k != "grad_output"}
    got = cupyops.modulate(x, **{k: device[k] for k in forward})
    assert same_bits(got, cupyops.modulate(first, **forward))
    for length in (9, 300):
        a = sequence(rng, (70, length), "float32", "decay")[: 2000 // length]
        y = cupyops.exp_segsum(on_device(a)).values
        assert_exp_segsum(y, a)
        grad = cupyops.exp_segsum_backward(on_device(y), grad_output=on_device(y)).values
        assert_exp_segsum_backward(grad, y, y)
    assert max(math.prod(launch.grid[:1]) for launch in executor.launched) == 3
    assert any(launch.grid[0] == 3 for launch in executor.launched)


def test_a_block_may_take_several_tiles_without_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "MAX_GRID", 2)
    rng = np.random.default_rng(16)
    problem = modulation_problem(rng, (9, 130, 40), "float32", "B,D", "D")
    checked(Case("modulate_backward", MODULATE_BACKWARD, problem, (True,)))
    for length, count in ((8, 300), (140, 23), (260, 20), (328, 3)):
        y, grad = gradient_pair(rng, (count, length, length), "float32")
        above = np.broadcast_to(np.triu(np.ones((length, length), bool)), y.shape)
        inputs = {"y": y, "grad_output": grad}
        unread = {"y": above, "grad_output": above}
        checked(Case(f"exp_segsum_backward-{length}", EXP_SEGSUM_BACKWARD, inputs, (), unread))


def test_leading_axes_that_cannot_be_merged_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of them: four inside the kernel, two launched index by index."""
    executor = SimulatedExecutor()
    simulated.install(monkeypatch, executor)
    rng = np.random.default_rng(13)
    shape = (2, 3, 2, 2, 3, 2)
    order = (5, 2, 4, 0, 3, 1)
    x = sequence(rng, (*(shape[i] for i in order), 5), "float32", "decay")
    x = x.transpose(*np.argsort(order), 6)
    assert x.shape == (*shape, 5)
    y = cupyops.exp_segsum(GpuArray(x)).values
    assert len(executor.launched) > 1
    assert same_bits(y, cupyops.exp_segsum(on_device(x)).values)
    assert_exp_segsum(y, x)
    turned = y.transpose(*order, 6, 7).copy().transpose(*np.argsort(order), 6, 7)
    got = cupyops.exp_segsum_backward(GpuArray(turned), grad_output=on_device(y)).values
    assert_exp_segsum_backward(got, y, y)


# -- identities that hold as bits on a GPU --------------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_blocks_and_padding_are_bitwise_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    simulated.install(monkeypatch, SimulatedExecutor())
    rng = np.random.default_rng(14)
    x = sequence(rng, (70,), name)
    whole = cupyops.exp_segsum(on_device(x)).values
    for start, stop in ((0, 33), (16, 70), (40, 41)):
        part = cupyops.exp_segsum(on_device(x[start:stop])).values
        assert same_bits(part, whole[start:stop, start:stop])
    padded = np.concatenate([x, np.zeros(3, x.dtype)])
    more = cupyops.exp_segsum(on_device(padded)).values
    assert same_bits(more[:70, :70], whole)
    assert same_bits(more[72, :70], whole[69])


def test_the_exponential_is_within_two_ulp_of_the_compute_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated.install(monkeypatch, SimulatedExecutor())
    rng = np.random.default_rng(15)
    for dtype, wide, low, high in (
        (np.float32, np.float64, -104.0, 88.7),
        (np.float64, np.longdouble, -745.2, 709.7),
    ):
        exponents = [rng.uniform(low, high, 40_000), rng.uniform(-1, 1, 40_000)]
        exponents.append(np.linspace(low, low + 20, 20_000))  # subnormal results
        values = np.concatenate(exponents).astype(dtype)
        pairs = np.stack([np.zeros_like(values), values], axis=1)
        got = cupyops.exp_segsum(on_device(pairs)).values[:, 1, 0]
        want = np.exp(values.astype(wide))
        ulp = np.maximum(np.spacing(want.astype(dtype)), np.finfo(dtype).smallest_subnormal)
        assert np.max(np.abs(got.astype(wide) - want) / ulp) <= 2


# -- the PTX itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_ptx_flushes_nothing_and_fuses_only_in_the_exponential(target: str, source: str) -> None:
    text = _kernels.source_text(source)
    ptx = nvrtc.compile_ptx(text, simulated.options(target), instances(source)).ptx
    code = [line.split("//")[0] for line in ptx.splitlines()]
    assert not [line for line in code if ".ftz" in line]
    assert not [line for line in code if re.search(r"\b(atom|red)\.", line)]
    assert not [line for line in code if re.search(r"\b(ld|st)\.local", line)]
    fused = [line for line in code if re.search(r"\bfma\.", line)]
    assert bool(fused) == (source == "exp_segsum.cu")


@pytest.mark.parametrize("source", SOURCES)
def test_vector_forms_move_sixteen_bytes_at_once(source: str) -> None:
    text = _kernels.source_text(source)
    names = [name for name in instances(source) if name.endswith("true>")]
    made = nvrtc.compile_ptx(text, simulated.options(TARGETS[0]), names)
    moves = r"\.global(?:\.v4\.(?:u|b|f)32|\.v2\.(?:u|b|f)64)"
    for name in names:
        start = made.ptx.index(f".entry {made.lowered[name]}(")
        body = made.ptx[start : made.ptx.find(".entry", start + 1)]
        assert re.search("(?:ld|st)" + moves, body), name


# -- traffic and speed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_traffic_is_within_the_targets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*traffic.modulation_rows(name), *traffic.segment_rows(name)]
    with capsys.disabled():
        print("\n" + traffic.table(rows))
    for row in rows:
        if traffic.row_bytes(row) >= 128:
            assert row.ratio <= 1.05, row
            in_vectors = all("true" in kernel or "combine" in kernel for kernel in row.kernels)
            # Rows at odd addresses: a warp's 64 bytes of 16-bit elements touch up to three sectors.
            assert row.request_ratio <= (1.15 if in_vectors else 2), row
            # A pass through shared memory takes less time than a sector from memory.
            assert row.bank_conflicts <= row.sectors * (0.15 if in_vectors else 0.4), row
        if row.operator == "modulate_backward" and row.counted[1] <= CHUNK_ROWS:
            assert row.workspace == 0, row


@pytest.mark.parametrize("layout", [name for name in LAYOUT_NAMES if name != "B,D"])
def test_other_layouts_add_no_traffic_but_their_partial_sums(layout: str) -> None:
    shape = (4, 128, 512)
    x = memory.copy(np.ones(shape, np.float32))
    scale = memory.copy(np.ones(modulate_layouts(shape)[layout], np.float32))
    inputs = {"x": x, "grad_output": memory.copy(x), "scale": scale, "shift": memory.copy(scale)}
    least = 2 * traffic.sectors_of(x) + traffic.sectors_of(scale)
    row = traffic.count(MODULATE_BACKWARD, inputs, least, shape, shape, True)
    assert (row.sectors - row.workspace) / row.least <= 1.05, row


def test_a_million_elements_run_in_well_under_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SimulatedExecutor()
    simulated.install(monkeypatch, executor)
    x = on_device(np.ones((2, 512, 1024), np.float32))
    row = on_device(np.ones((2, 1024), np.float32))
    cupyops.modulate_backward(x, grad_output=x, scale=row)  # builds the kernel
    assert min(timed(lambda: cupyops.modulate_backward(x, grad_output=x, scale=row))) < 0.5


def timed(function: Any, repeats: int = 3) -> Iterator[float]:
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        yield time.perf_counter() - start
