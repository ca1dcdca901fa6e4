"""The host path, imports and compile times, as tests/bench/host.py measures them."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bench import host
from cupyops.cli.arguments import OPERATORS


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(host, "CALLS", 2)


@pytest.mark.usefixtures("few")
def test_the_host_path_is_timed_for_every_operator_and_leaves_nothing_behind() -> None:
    before, executor = sys.modules.get("cupy"), host._plan.EXECUTORS["cupy"]
    found = host.host_path()
    assert sys.modules.get("cupy") is before
    assert host._plan.EXECUTORS["cupy"] is executor
    names = [f"{operator} {how}" for operator in OPERATORS for how in ("plan.run", "eager")]
    assert [figure.what for figure in found] == 2 * names
    assert [figure.target for figure in found[:2]] == [15e-6, 40e-6]
    assert all(figure.seconds for figure in found)


def test_the_stand_in_gets_the_launches_of_a_gpu() -> None:
    with host.stand_in() as cupy:
        launched: list[str] = []

        class Function(host._Function):
            def __call__(self, grid: Any, block: Any, args: Any, **_: Any) -> None:
                launched.append(grid)

        functions = types.SimpleNamespace(get_function=lambda name: Function())
        cupy.RawModule = lambda **_: functions
        for operator in OPERATORS:
            for call in host.calls(operator, cupy.empty).values():
                launched.clear()
                call()
                assert launched, operator


def test_compile_and_import_times() -> None:
    loaded, *compiled = host.compile_times()
    assert loaded.what == "load NVRTC"
    assert [figure.what for figure in compiled] == [f"{operator} compile" for operator in OPERATORS]
    assert all(figure.seconds > 0 for figure in compiled)
    assert [figure.note for figure in host.imports()] == ["NumPy included", "after NumPy"]


@pytest.mark.usefixtures("few")
def test_the_table_of_the_host_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [host.Figure("a", 20e-6, 15e-6), host.Figure("b", 0.25, 0.5, "cold")]
    monkeypatch.setattr(host, "host_path", lambda: figures)
    monkeypatch.setattr(host, "imports", lambda: [host.Figure("c", None, 0.5, "absent: it")])
    monkeypatch.setattr(host, "compile_times", lambda: [])
    path = tmp_path / "host.json"
    assert host.main(["--json", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows[0] == ["a", "20", "us", "15", "us", "MISSED"]
    assert rows[1] == ["b", "0.25", "s", "0.5", "s", "met", "cold"]
    assert rows[2] == ["c", "-", "0.5", "s", "absent:", "it"]
    assert [figure["what"] for figure in json.loads(path.read_text())["figures"]] == ["a", "b", "c"]
