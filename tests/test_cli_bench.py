"""`bench`: right results before times, turns, figures for machines and pictures, errors first."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyops
from cupyops.cli import backends, bench, cases, main, measure, naive, reference
from support import DTYPE_NAMES

OPERATORS = tuple(naive.NAIVE)
QUICK = ["bench", "--quick", "--rounds", "1", "--backend", "numpy"]


# -- measure ------------------------------------------------------------------------------------


class Clock:
    """A clock that the contenders themselves advance; notes who had a turn."""

    def __init__(self) -> None:
        self.now, self.turns = 0.0, []

    def __call__(self, run: Callable[[], Any], loops: int) -> float:
        start = self.now
        for _ in range(loops):
            run()
        self.turns.append((run.__name__, loops))
        return self.now - start


def contender(clock: Clock, name: str, seconds: float, fault: str | None = None) -> Any:
    def run() -> str:
        clock.now += seconds
        return name

    def judge(results: str) -> reference.Verdict:
        assert results == name
        return reference.Verdict(0.5, 1e-7, fault)

    run.__name__ = name
    return measure.Contender(run, judge)


def test_contenders_take_turns_in_rotating_order() -> None:
    clock = Clock()
    three = {name: contender(clock, name, 1.0) for name in "abc"}
    measure.measure(three, rounds=3, clock=clock)
    warm_up, turns = clock.turns[:3], [name for name, _ in clock.turns[3:]]
    assert [name for name, _ in warm_up] == ["a", "b", "c"]
    assert turns == [*"abc", *"bca", *"cab"]


@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 3e-3, 0.019, 2.0])
def test_a_sample_is_long_enough_and_not_much_longer(seconds: float) -> None:
    clock = Clock()
    (found,) = measure.measure(
        {"a": contender(clock, "a", seconds)}, rounds=5, clock=clock
    ).values()
    assert found.timing is not None
    assert found.timing.median == pytest.approx(seconds)
    assert found.timing.rounds == 5
    sample = found.timing.loops * seconds
    assert sample >= measure.SAMPLE_SECONDS / 2
    assert sample <= 2 * max(measure.SAMPLE_SECONDS, seconds)


def test_a_wrong_or_failing_contender_gets_no_time_and_the_others_do() -> None:
    clock = Clock()

    def breaks() -> None:
        raise ValueError("no such\nkernel")

    found = measure.measure(
        {
            "wrong": contender(clock, "wrong", 1.0, fault="result[0] is 1; expected 2"),
            "breaks": measure.Contender(breaks, lambda _: pytest.fail("there is no result")),
            "right": contender(clock, "right", 1.0),
        },
        rounds=3,
        clock=clock,
    )
    assert found["wrong"] == measure.Outcome(1e-7, "result[0] is 1; expected 2", None)
    assert found["breaks"] == measure.Outcome(None, "ValueError: no such kernel", None)
    assert found["right"].timing is not None
    assert {name for name, _ in clock.turns} == {"right"}


def test_the_summary_is_median_least_and_quartiles() -> None:
    found = measure.summary([5.0, 1.0, 2.0, 4.0, 30.0], loops=7)
    assert found == measure.Timing(4.0, 1.0, 2.0, 5.0, 5, 7)
    assert measure.summary([3.0], loops=1) == measure.Timing(3.0, 3.0, 3.0, 3.0, 1, 1)


# -- cases --------------------------------------------------------------------------------------


def test_least_bytes_by_hand() -> None:
    def least(operator: str, shape: tuple[int, ...], dtype: str = "float32") -> int:
        return cases.Case(operator, shape, dtype).least_bytes

    # x, out, and rows of scale and shift
    assert least("modulate", (2, 3, 5)) == 4 * (30 + 30 + 10 + 10)
    # x, grad_output, grad_input, and rows of scale, grad_scale, grad_shift
    assert least("modulate_backward", (2, 3, 5), "float16") == 2 * (90 + 30)
    assert least("exp_segsum", (7, 4), "float64") == 8 * (28 + 7 * 16)
    # six elements lie below the diagonal of each matrix
    assert least("exp_segsum_backward", (7, 4), "bfloat16") == 2 * (2 * 7 * 6 + 28)


def test_the_shapes_of_each_selection() -> None:
    default = cases.select(None, None, None)
    assert len(default) == 2 * 5 + 2 * 8
    assert {case.dtype for case in default} == {"float32"}
    everything = cases.select(None, None, None, everything=True)
    assert len(everything) == 4 * len(default)
    quick = cases.select(None, None, None, quick=True)
    assert [case.operator for case in quick] == list(OPERATORS)
    some = cases.select(["exp_segsum"], ["float16", "float64"], [(3, 5), (2, 3, 4)])
    assert some == [cases.Case("exp_segsum", (3, 5), d) for d in ("float16", "float64")]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_judged_part_of_a_large_case_agrees_with_the_whole(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting inputs and cutting results is the same."""
    case = cases.Case(operator, (5, 7, 40) if operator.startswith("mod") else (9, 12), "float64")
    assert case.judged == "all"
    whole = reference.expected(operator, case.inputs(), case.options)
    monkeypatch.setattr(cases, "JUDGED_ELEMENTS", 400)
    assert case.judged != "all"
    cut = {name: case.part(values) for name, values in case.inputs().items()}
    part = reference.expected(operator, cut, case.options)
    for full, piece in zip(whole, part, strict=True):
        assert piece.value.size < full.value.size
        np.testing.assert_array_equal(case.part(full.value), piece.value)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_both_contenders_pass_the_gate(operator: str, dtype: str, with_out: bool) -> None:
    shape = (2, 130, 24) if operator.startswith("modulate") else (3, 33)
    case, on = cases.Case(operator, shape, dtype), backends.backend("numpy")
    both = bench.contenders(case, on, with_out)
    assert list(both) == ["cupyops", "naive"]
    for one in both.values():
        results = one.run()
        verdict = one.judge(results)
        assert verdict.fault is None
        assert 0 <= verdict.error < 0.2
        if with_out:  # the same arrays again and again
            assert all(a is b for a, b in zip(results, one.run(), strict=True))


def test_the_naive_lines_must_be_right_too() -> None:
    case, on = cases.Case("modulate", (2, 9, 5), "float16"), backends.backend("numpy")
    one = bench.contenders(case, on, False)["naive"]
    (result,) = one.run()
    assert "(90 of 90 wrong)" in (one.judge((result * 1.1,)).fault or "")
    assert one.judge((result[:1],)).fault == (
        "result is float16[1, 9, 5]; expected float16[2, 9, 5]"
    )


# -- the command --------------------------------------------------------------------------------


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert not err
    report = json.loads(out)
    assert set(report) == {
        "command",
        "date",
        "backend",
        "with_out",
        "rounds",
        "environment",
        "cases",
    }
    assert report["backend"] == "numpy"
    assert report["rounds"] == 1
    assert report["environment"]["cupyops"] == cupyops.__version__
    assert [line["operator"] for line in report["cases"]] == list(OPERATORS)
    for line in report["cases"]:
        assert set(line) == {
            "operator",
            "shape",
            "dtype",
            "least_bytes",
            "judged",
            "contenders",
            "ratio",
        }
        ours, plain = line["contenders"]["cupyops"], line["contenders"]["naive"]
        assert line["ratio"] == pytest.approx(ours["ms"] / plain["ms"])
        for found in (ours, plain):
            assert found["fault"] is None
            assert found["error"] < 1e-5
            assert 0 < found["ms_least"] <= found["ms"]
            low, high = found["ms_quartiles"]
            assert low <= found["ms"] <= high
            assert found["gb_s"] == pytest.approx(line["least_bytes"] / found["ms"] / 1e6)


def test_a_file_gets_the_json_and_standard_output_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    arguments = [*QUICK, "--operator", "exp_segsum", "--out", "--json", str(path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["with_out"] is True
    (line,) = report["cases"]
    (row,) = [text.split() for text in out.splitlines() if text.startswith("exp_segsum")]
    assert row[:3] == ["exp_segsum", "700x50", "float32"]
    ours, plain = line["contenders"]["cupyops"], line["contenders"]["naive"]
    assert row[3:6] == [f"{ours['ms']:.3f}", f"{plain['ms']:.3f}", f"{line['ratio']:.2f}"]
    assert row[6:] == [f"{ours['gb_s']:.1f}", f"{ours['error']:.1e}", f"{plain['error']:.1e}"]
    assert "existing arrays (out=), medians of 1 round\n" in out


def test_shapes_and_dtypes_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["--shape", "3x4x5", "--shape", "6X7", "--dtype", "bfloat16", "--dtype", "float64"]
    assert main(["bench", *choice, "--rounds", "1", "--backend", "numpy", "--json", "-"]) == 0
    lines = json.loads(capsys.readouterr().out)["cases"]
    assert len(lines) == 8
    assert {tuple(line["shape"]) for line in lines} == {(3, 4, 5), (6, 7)}
    assert {line["dtype"] for line in lines} == {"bfloat16", "float64"}


def test_a_wrong_result_gets_no_time_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cupyops.exp_segsum

    def off(x: Any, /, **arguments: Any) -> Any:
        result = real(x, **arguments)
        result[-1, -1, 0] *= 1.001
        return result

    monkeypatch.setattr(cupyops, "exp_segsum", off)
    assert main([*QUICK, "--operator", "exp_segsum"]) == 1
    out = capsys.readouterr().out
    (row,) = [text.split() for text in out.splitlines() if text.startswith("exp_segsum")]
    assert row[3] == row[5] == row[6] == "-"
    assert float(row[4]) > 0  # the other one is timed
    (fault,) = [text for text in out.splitlines() if text.startswith("  cupyops is not timed: ")]
    assert "result[159, 49, 0] is " in fault
    assert fault.endswith("(1 of 400000 wrong); indices are those in 160 of 700 segments")


def test_too_little_memory_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(bench, "contenders", full)
    assert main([*QUICK, "--operator", "modulate"]) == 1
    assert "cupyops is not timed: too little memory" in capsys.readouterr().out


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_case", lambda *_, **__: pytest.fail("it was measured"))


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_path_that_cannot_be_written_is_an_error_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "missing" / "results.png"
    assert main([*QUICK, option, str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    expected = f"python -m cupyops bench: error: cannot write {path}: No such file or directory\n"
    assert err == expected


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_picture_without_matplotlib_is_an_error_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*QUICK, "--plot", str(tmp_path / "a.png")]) == 2
    err = capsys.readouterr().err
    assert "--plot needs matplotlib" in err
    assert "the extra 'bench' of cupyops brings it" in err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_picture_of_an_unknown_kind_is_an_error_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert main([*QUICK, "--plot", str(tmp_path / "a.xyz")]) == 2
    assert "expected a name that ends in .png, .svg, .pdf" in capsys.readouterr().err


def test_checking_a_path_leaves_no_trace(tmp_path: Path) -> None:
    bench.check_writable(str(tmp_path / "new"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("kept")
    bench.check_writable(str(tmp_path / "old"))
    assert (tmp_path / "old").read_text() == "kept"


def test_the_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.png"
    assert main([*QUICK, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 10_000


def test_the_picture_shows_a_contender_without_a_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cupyops.cli import plot

    rates = [{"gb_s": 3.0}, {"fault": "wrong"}]
    line = {"operator": "modulate", "shape": [1, 2, 3], "dtype": "float32"}
    line["contenders"] = dict(zip(("cupyops", "naive"), rates, strict=True))
    environment = {"device": None, "cupyops": "0"}
    report = {"backend": "numpy", "environment": environment, "cases": [line]}
    plot.draw(report, str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


# -- the layer over CuPy ------------------------------------------------------------------------


class Pointer:
    def __init__(self, memory: np.ndarray, offset: int = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


class Event:
    now = 0.0
    log: list[str] = []  # noqa: RUF012 - of the class

    def record(self) -> None:
        self.at = Event.now
        Event.log.append("record")

    def synchronize(self) -> None:
        Event.log.append("synchronize")


def stand_in() -> Any:
    """What the back end asks of CuPy; arrays are NumPy's."""

    def array(shape: Any, dtype: Any, data: Pointer, strides: Any) -> Any:
        values = np.ndarray(shape, dtype, data.memory, data.offset, strides)
        return types.SimpleNamespace(values=values, get=values.copy)

    cuda = types.SimpleNamespace(
        Event=Event, get_elapsed_time=lambda start, end: 1e3 * (end.at - start.at)
    )
    return types.SimpleNamespace(
        asarray=lambda values: types.SimpleNamespace(data=Pointer(values.copy())),
        ndarray=array,
        cuda=cuda,
    )


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_arrays_reach_the_gpu_with_values_and_strides(dtype: str) -> None:
    from cupyops.cli.selftest_cases import reversed_view

    on = backends._cupy(stand_in())
    values = np.arange(60).reshape(3, 4, 5).astype(reference.FORMATS[dtype].dtype)
    for sent in (values, reversed_view(values), values[::-1, :, 1::2], values[:0]):
        array = on.put(sent)
        assert array.values.strides == sent.strides
        assert np.array_equal(on.get(array), sent)


def test_the_gpu_clock_records_waits_and_divides() -> None:
    on = backends._cupy(stand_in())
    Event.log.clear()

    def run() -> None:
        Event.now += 0.25
        Event.log.append("run")

    assert on.seconds(run, 2) == pytest.approx(0.5)
    assert Event.log == ["record", "run", "run", "record", "synchronize"]


def test_errors_are_finite_in_json() -> None:
    outcome = measure.Outcome(math.inf, "wrong", None)
    assert bench.figures(outcome, 1) == {"error": None, "fault": "wrong", "ms": None}
