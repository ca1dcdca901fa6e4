"""The benchmark suite in tests/bench: right results first, every peer accounted for, and a guard.

torch, JAX and numba need not be here: those that are take part, the others have to be reported.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyops
from bench import cases, environment, guard, peers, plot, report, run
from bench.cases import Absent, Case, Work
from bench.peers import FLOOR, OURS
from cupyops.cli import measure
from cupyops.cli.reference import Verdict
from support import DTYPE_NAMES

OPERATORS = cases.OPERATORS
LIBRARIES = ("torch", "jax", "numba")
PEERS = peers.all_peers(run.ON.seconds)


def small(operator: str, dtype: str = "float32") -> Case:
    return Case(operator, (2, 70, 9) if operator.startswith("modulate") else (3, 33), dtype)


def work(case: Case, with_out: bool) -> Work:
    dtype = cases.FORMATS[case.dtype].dtype
    outs = tuple(np.full(shape, 7, dtype) for shape in cases.outputs(case)) if with_out else None
    return Work(case, case.inputs(), outs)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a call or two: figures that mean nothing, soon."""
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-5)
    monkeypatch.setattr(measure, "_loops", lambda *_: 1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library can be imported."""
    for name in (*LIBRARIES, "jaxlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("torch_peers", "jax_peer", "numba_loops"):
        monkeypatch.delitem(sys.modules, f"bench.{name}", raising=False)


def cut(monkeypatch: pytest.MonkeyPatch, chosen: list[Case]) -> None:
    monkeypatch.setattr(cases, "select", lambda *_, **__: chosen)


# -- peers --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")  # of other libraries
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_peer_is_right_or_says_why_it_is_absent(
    operator: str, dtype: str, with_out: bool
) -> None:
    missing, given = peers.absent(PEERS), work(small(operator, dtype), with_out)
    assert not {OURS, "naive", FLOOR} & set(missing)
    gate, reasons = run.Gate(given.case, given.arrays), set()
    for name, peer in PEERS.items():
        if name == "compile" and dtype != "bfloat16":
            continue  # takes seconds
        if name in missing:
            assert peer.needs[0] in missing[name]
            continue
        try:
            call = peer.bind(given)
        except Absent as absent:
            reasons.add(str(absent))
            continue
        for _ in range(2):  # a second call must not find what the first one left
            verdict = gate.judge(peer)(call())
            assert verdict.fault is None, name
            assert verdict.error < 0.2
    assert reasons <= {"takes no out=", "only with out=", "a backward pass only"}


@pytest.mark.usefixtures("alone")
def test_libraries_that_cannot_be_imported_are_named() -> None:
    missing = peers.absent(PEERS)
    assert set(missing) == {"torch", "autograd", "compile", "jax", "numba", "numba2"}
    assert all(PEERS[name].needs[0] in reason for name, reason in missing.items())
    assert peers.versions(PEERS) == {}
    assert "copy by NumPy" in peers.floor_meaning()


def test_a_broken_installation_is_absent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libgomp.so.1:\nno such file")

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    reason = peers.absent({"torch": PEERS["torch"]})["torch"]
    assert reason == "torch cannot be imported: OSError: libgomp.so.1: no such file"


@pytest.mark.usefixtures("alone")
def test_the_floor_without_numba_moves_the_least_bytes() -> None:
    given = work(Case("modulate", (2, 3, 5), "float32"), True)
    (call,) = [peers._floor(run.ON.seconds, given)]
    source, target = (cell.cell_contents for cell in call.__closure__)
    call()
    assert source.nbytes + target.nbytes == given.case.least_bytes
    assert (source == target).all()


def test_results_have_the_shapes_of_the_plan() -> None:
    for operator in OPERATORS:
        given = work(small(operator), False)
        (_, first), *rest = given.arrays.items()
        plan = getattr(cupyops, f"plan_{operator}")(first, **dict(rest), **given.case.options)
        assert cases.outputs(given.case) == [spec.shape for spec in plan.outputs]


# -- numba's loops, as Python -------------------------------------------------------------------


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The loops without numba: decorators that leave functions as they are."""
    numba, extending = types.ModuleType("numba"), types.ModuleType("numba.extending")
    llvmlite: Any = types.ModuleType("llvmlite")
    numba.prange, numba.types = range, types.SimpleNamespace()
    numba.njit = lambda function, **_: function
    extending.intrinsic = lambda function: function
    kinds = ("HalfType", "FloatType", "IntType")
    llvmlite.ir = types.SimpleNamespace(**{kind: lambda *_: None for kind in kinds})
    for name, module in (("numba", numba), ("numba.extending", extending), ("llvmlite", llvmlite)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "bench.numba_loops", raising=False)
    made = importlib.import_module("bench.numba_loops")
    monkeypatch.setattr(made, "power_of_two", lambda exponent: type(exponent)(2) ** exponent)
    yield made
    sys.modules.pop("bench.numba_loops", None)
    delattr(importlib.import_module("bench"), "numba_loops")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_compiled_pass_is_right(
    operator: str, dtype: str, loops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "STRIP", 8)  # several strips and column blocks, several tasks
    monkeypatch.setattr(loops, "COLUMNS", 4)
    monkeypatch.setattr(loops, "TASK", 40)
    given = work(small(operator, dtype), True)
    compute = np.dtype(dtype).type
    given_arrays = loops.arguments(operator, given.arrays, given.outs, compute, compute)
    loops.loop(operator, dtype, False)(*given_arrays)
    verdict = run.Gate(given.case, given.arrays).judge(PEERS["numba"])(given.outs)
    assert verdict.fault is None


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_floor_touches_what_the_operator_has_to(operator: str, loops: Any) -> None:
    given = work(small(operator), True)
    memory = np.dtype(np.uint32)
    arrays = loops.arguments(operator, given.arrays, given.outs, memory, memory)
    loops.floor_loop(operator, False)(*arrays)
    inputs = [array.view(memory) for array in given.arrays.values()]
    result = given.outs[0].view(memory)
    if operator == "modulate":
        want = inputs[0]
    elif operator == "modulate_backward":
        want = inputs[0] ^ inputs[1]
    elif operator == "exp_segsum":
        want = np.broadcast_to(inputs[0][..., None], result.shape)
    else:
        below = np.tril(inputs[0] ^ inputs[1], -1)
        want = np.bitwise_xor.reduce(below, -1) ^ inputs[0][:, :1, 0]
    np.testing.assert_array_equal(result, want)


# -- a run --------------------------------------------------------------------------------------


def fake(name: str, results: Any = None, seconds: float = 0.0) -> peers.Peer:
    """A peer that gives these results; cupyops' own if there are none."""

    def bind(given: Work) -> Any:
        ours = PEERS[OURS].bind(given)
        return (lambda: results) if results is not None else ours

    return peers.Peer(name, "planted", bind)


@pytest.mark.usefixtures("quick")
def test_a_wrong_contender_gets_no_time_and_the_others_do() -> None:
    case = small("modulate")
    wrong = (np.ones(case.shape, np.float32),)

    def raises(given: Work) -> Any:
        raise ValueError("no such\ninstruction")

    chosen = {OURS: PEERS[OURS], "naive": PEERS["naive"], "wrong": fake("wrong", wrong)}
    chosen |= {"raises": peers.Peer("raises", "", raises), "gone": fake("gone")}
    reason = {"gone": "gone is not installed"}
    (line,) = run.measure_case(case, chosen, reason, rounds=2, modes=(False,))
    found = line["contenders"]
    assert found["wrong"]["ms"] is None
    assert "wrong)" in found["wrong"]["fault"]
    assert found["raises"]["fault"] == "cannot be prepared: ValueError: no such instruction"
    assert found["gone"] == {
        "error": None, "fault": None, "ms": None, "absent": "gone is not installed",
    }  # fmt: skip
    assert set(line["ratios"]) == {"naive"}
    assert line["ratios"]["naive"] == found[OURS]["ms"] / found["naive"]["ms"]


@pytest.mark.usefixtures("quick")
def test_too_little_memory_is_said_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_bytes", lambda: 1000)
    case = Case("exp_segsum", (8192, 64), "float64")
    lines = run.measure_case(case, {OURS: PEERS[OURS]}, {}, rounds=1, modes=(False, True))
    assert [line["with_out"] for line in lines] == [False, True]
    for line in lines:
        assert line["contenders"][OURS]["fault"].startswith("too little memory: 2.4 GB")


@pytest.mark.usefixtures("quick", "alone")
def test_the_whole_command_without_any_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(monkeypatch, [small(operator) for operator in OPERATORS])
    paths = {name: tmp_path / f"all.{name}" for name in ("json", "md", "png")}
    options = ["--rounds", "2", "--json", str(paths["json"]), "--markdown", str(paths["md"])]
    assert run.main([*options, "--plot", str(paths["png"])]) == 0
    out = capsys.readouterr().out
    assert "ABSENT: torch is not installed" in out
    assert "4 cases, about 1 minute\n" in out

    found = json.loads(paths["json"].read_text())
    assert set(found) == {"environment", "rounds", "peers", "cases", "seconds"}
    assert list(found["peers"]) == list(PEERS)
    assert found["peers"]["jax"]["absent"] == "jax is not installed"
    assert found["peers"]["naive"]["absent"] is None
    assert len(found["cases"]) == 2 * len(OPERATORS)
    for line in found["cases"]:
        assert list(sorted(line["contenders"])) == sorted(PEERS)
        ours, plain = line["contenders"][OURS], line["contenders"]["naive"]
        assert line["ratios"] == {"naive": pytest.approx(ours["ms"] / plain["ms"])}
        assert ours["error"] < 1e-5
        floor = line["contenders"][FLOOR]
        if line["with_out"]:
            assert line["floor_over_ours"] == pytest.approx(floor["ms"] / ours["ms"])
        else:
            assert floor["absent"] == "only with out="
            assert line["floor_over_ours"] is None
    known = found["environment"]
    assert known["command"].startswith("python tests/bench/run.py")
    assert {"cpu", "caches", "threads", "date", "packages", "load_before"} <= set(known)
    assert str(Path(cupyops.__file__).parent) not in json.dumps(known)

    text = paths["md"].read_text()
    assert "* torch: **absent**: torch is not installed" in text
    assert [f"### {operator}" in text for operator in OPERATORS] == [True] * 4
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1

    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == sorted(
        ["all-floor.png"]
        + [f"all-ratios-{operator}{end}.png" for operator in OPERATORS for end in ("", "-out")]
    )
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert f"drawn: {path}" in out


@pytest.mark.usefixtures("quick")
def test_a_wrong_result_of_ours_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cupyops, "exp_segsum", lambda x, /, **_: np.zeros((*x.shape, 33), x.dtype))
    cut(monkeypatch, [small("exp_segsum")])
    assert run.main(["--rounds", "1", "--no-out", "--peer", "naive"]) == 1
    out = capsys.readouterr().out
    assert "  cupyops is not timed: result[0, 0, 0] is 0; expected 1" in out
    (row,) = [line for line in out.splitlines() if "new arrays" in line]
    assert row.split()[5:] == ["-", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--operator", "modulate", "--shape", "4x8"], "no operator takes these shapes"),
        (["--json", "/no/such/place/a.json"], "cannot write /no/such/place/a.json"),
        (["--plot", "a.txt"], "expected a name that ends in"),
    ],
)
def test_errors_come_before_the_work(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(options) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err


def test_errors_of_both_modes_share_a_row() -> None:
    def line(with_out: bool, **errors: float | None) -> dict[str, Any]:
        found = {name: {"error": error} for name, error in errors.items()}
        base = {"operator": "modulate", "shape": [1, 2, 3], "dtype": "float32"}
        return {**base, "with_out": with_out, "contenders": found}

    both = {"cases": [line(False, a=1.0, b=None), line(True, a=2.0, b=3.0)]}
    (merged,) = report.judgements(both)
    assert {n: f["error"] for n, f in merged["contenders"].items()} == {"a": 1.0, "b": 3.0}


def test_an_estimate_grows_with_the_work() -> None:
    few, many = (cases.estimated_seconds(small("modulate"), [OURS], n) for n in (1, 100))
    large = cases.estimated_seconds(Case("modulate", (8, 4096, 1152), "float64"), [OURS], 100)
    assert 0 < few < many < large


def test_a_picture_shows_what_has_no_time(tmp_path: Path) -> None:
    line = {
        "operator": "modulate",
        "shape": [1, 2, 3],
        "dtype": "float32",
        "with_out": True,
        "ratios": {"naive": 0.5},
        "floor_over_ours": None,
        "contenders": {},
    }
    known = {"cupyops": "0", "cpu": "a processor", "threads": 2}
    titles = {name: {"title": name} for name in (OURS, "naive", "torch")}
    both = {"environment": known, "peers": titles, "cases": [line, {**line, "ratios": {}}]}
    (path,) = plot.draw(both, str(tmp_path / "a.svg"))
    assert path.name == "a-ratios-modulate-out.svg"
    assert plot.main([str(tmp_path / "missing.json"), str(tmp_path / "a.png")]) == 2


# -- the guard ----------------------------------------------------------------------------------


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Ratios to be measured, by case and attempt; and a file with all of them at 0.5."""
    found = types.SimpleNamespace(path=tmp_path / "ratios.json", planted={}, rounds=[])

    def ratio_of(case: Case, rounds: int) -> float:
        planted = found.planted.get(str(case), [0.5])
        found.rounds.append(rounds)
        value = planted.pop(0) if len(planted) > 1 else planted[0]
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(guard, "ratio_of", ratio_of)
    assert guard.main(["--record", "--file", str(found.path)]) == 0
    found.rounds.clear()
    return found


VICTIM = "exp_segsum 128x128 bfloat16"


def test_the_guard_covers_all_operators_and_dtypes_in_two_sizes() -> None:
    chosen = cases.guarded()
    assert len(chosen) == len(set(chosen)) == 4 * 4 * 2
    assert VICTIM in map(str, chosen)


def test_the_guard_passes_where_nothing_is_lost(ratios: Any) -> None:
    ratios.planted[VICTIM] = [0.69]  # 38 % slower
    assert guard.main(["--file", str(ratios.path)]) == 0
    assert set(ratios.rounds) == {guard.ROUNDS[0]}
    recorded = json.loads(ratios.path.read_text())
    assert set(recorded["ratios"].values()) == {0.5}
    assert recorded["environment"]["threads"] == cases.THREADS


def test_the_guard_fails_for_a_slow_down(ratios: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ratios.planted[VICTIM] = [1.0, 0.8, 0.9]
    assert guard.main(["--file", str(ratios.path)]) == 1
    out = capsys.readouterr().out
    assert f"FAILED {VICTIM}: was 0.500, lost 60% in 3 attempts" in out
    assert "1 of 32 cases failed" in out
    assert [rounds for rounds in ratios.rounds if rounds > guard.ROUNDS[0]] == [15, 25]


def test_the_guard_forgives_what_does_not_last(ratios: Any) -> None:
    ratios.planted[VICTIM] = [2.0, 1.0, 0.6]
    assert guard.main(["--file", str(ratios.path)]) == 0


def test_the_guard_fails_for_a_wrong_result_and_for_a_new_case(
    ratios: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios.planted[VICTIM] = [guard.Wrong("cupyops is not timed: result[0] is 1")]
    recorded = json.loads(ratios.path.read_text())
    del recorded["ratios"]["modulate 4x16x256 float64"]
    ratios.path.write_text(json.dumps(recorded))
    assert guard.main(["--file", str(ratios.path)]) == 1
    out = capsys.readouterr().out
    assert f"FAILED {VICTIM}: cupyops is not timed: result[0] is 1" in out
    assert "FAILED modulate 4x16x256 float64: was never recorded" in out
    ratios.path.unlink()
    assert guard.main(["--file", str(ratios.path)]) == 2
    assert guard.main(["--record", "--file", str(ratios.path)]) == 1
    assert not ratios.path.exists()


@pytest.mark.usefixtures("quick")
def test_a_ratio_is_of_least_times_and_only_of_right_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert guard.ratio_of(small("modulate"), 2) > 0
    wrong = lambda *_, **__: Verdict(2.0, 1.0, "result[0] is 1; expected 2")  # noqa: E731
    monkeypatch.setattr(run, "judged", wrong)
    with pytest.raises(guard.Wrong, match="cupyops is not timed: result"):
        guard.ratio_of(small("modulate"), 1)
