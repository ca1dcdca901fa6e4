"""The command line: help, `info`, errors, and output that suits where it goes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cupyops.cli import main
from test_cupy_executor import Cupy, Runtime

ROOT = Path(__file__).parent.parent
COMMANDS = ("info", "selftest", "bench")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Control characters, the line feed apart."""


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "cupyops", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


# -- help and errors ----------------------------------------------------------------------------


def test_without_a_command_the_help_text_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    for name in COMMANDS:
        assert re.search(rf"^ +{name} ", err, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cupyops.cli.arguments import build_parser

    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^  python -m cupyops (.*?)(?:   .*| [|>] .*)?$", text, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        assert build_parser().parse_args(example.split()).command == name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import cupyops

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cupyops {cupyops.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["bench", "--operator", "relu"], "argument --operator: invalid choice: 'relu'"),
        (["bench", "--shape", "2y3"], "argument --shape: '2y3' is not a shape; expected BxLxD"),
        (["bench", "--shape", "2x-3"], "argument --shape: '2x-3' has a length below 1"),
        (["bench", "--shape", "2x0x4"], "argument --shape: '2x0x4' has a length below 1"),
        (["bench", "--rounds", "0"], "argument --rounds: '0' is not a number above 0"),
        (["bench", "--quick", "--all"], "argument --all: not allowed with argument --quick"),
        (["bench", "--operator", "modulate", "--shape", "4x8"], "none of the operators takes"),
        (
            ["bench", "--operator", "modulate", "--shape", "2x6x4", "--shape", "4x8"],
            "none of the operators takes the shape 4x8",
        ),
        (["selftest", "--backend", "torch"], "argument --backend: invalid choice: 'torch'"),
    ],
)
def test_an_error_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    last = err.splitlines()[-1]
    assert last.startswith(f"python -m cupyops {arguments[0]}: error: {message}")
    assert "Traceback" not in err


def test_an_interrupt_ends_with_status_130_and_no_traceback() -> None:
    # The command interrupts itself in its first case, as Ctrl-C would.
    code = (
        "import os, signal, sys, cupyops\n"
        "from cupyops.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"cupyops.modulate = lambda *a, **k: os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "sys.exit(main(['selftest']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "python -m cupyops selftest: interrupted"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_output_that_cannot_be_written_is_an_error_without_a_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cupyops", "info"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "python -m cupyops info: error: No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
@pytest.mark.parametrize("arguments", [["info"], ["selftest"], ["selftest", "--json"]])
def test_a_reader_that_leaves_early_sees_no_complaint(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "cupyops", *arguments],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 141
    assert done.stderr == ""


# -- the page -----------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_lists_the_options_that_exist(name: str) -> None:
    from cupyops.cli.arguments import build_parser

    (commands,) = (a for a in build_parser()._actions if isinstance(a.choices, dict))
    real = {option for a in commands.choices[name]._actions for option in a.option_strings}
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1 + COMMANDS.index(name)]
    assert section.startswith(name)
    rows = [line for line in section.splitlines() if line.startswith("| `--")]
    listed = {option for row in rows for option in re.findall(r"`(--[a-z-]+)", row)}
    assert listed == real - {"-h", "--help"}


def test_the_commands_on_the_page_parse() -> None:
    from cupyops.cli.arguments import build_parser

    commands = re.findall(r"^python -m cupyops (.*?)(?: +[#>].*)?$", PAGE, re.MULTILINE)
    assert len(commands) >= 6
    for each in commands:
        build_parser().parse_args(each.split())


def test_the_tables_on_the_page_have_the_columns_of_today() -> None:
    from cupyops.cli import bench, selftest, table

    for columns in (selftest.COLUMNS, bench.COLUMNS):
        assert f"\n{table.header(columns)}\n" in PAGE


# -- what is loaded, and when -------------------------------------------------------------------


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return set(done.stderr.split())


def test_importing_the_package_imports_nothing_of_the_command_line() -> None:
    dependencies = modules_after("import numpy, array_api_compat, ml_dtypes")
    added = modules_after("import cupyops, cupyops.aclnn") - dependencies
    names = {"argparse", "json", "tqdm", "matplotlib", "cupyops.cli", "cupyops.__main__"}
    assert not added & names


def test_piped_commands_import_neither_tqdm_nor_matplotlib() -> None:
    loaded = modules_after(
        "from cupyops.cli import main\n"
        "main(['info'])\nmain(['bench', '--quick', '--rounds', '1', '--operator', 'modulate'])"
    )
    assert "cupyops.cli.bench" in loaded
    assert not loaded & {"tqdm", "matplotlib", "cupyops.cli.plot"}


# -- info ---------------------------------------------------------------------------------------

KEYS = {
    "cupyops",
    "python",
    "platform",
    "cpu_count",
    "packages",
    "libraries",
    "cuda",
    "device",
    "kernel_cache",
    "kernel_sources",
}


def info_json(capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["info", "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    found = json.loads(out)
    assert set(found) == KEYS
    return found


def info_text(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["info"]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "cupy" else find(name)
    )


@pytest.mark.usefixtures("no_cupy")
def test_info_without_cupy(capsys: pytest.CaptureFixture[str]) -> None:
    found = info_json(capsys)
    assert found["libraries"] == {
        "numpy": {"usable": True, "reason": None},
        "cupy": {"usable": False, "reason": "CuPy is not installed"},
    }
    assert found["device"] is None
    assert Path(found["kernel_sources"]).samefile(ROOT / "kernels_cu")
    text = info_text(capsys)
    assert re.search(r"^cupy arrays +not usable: CuPy is not installed$", text, re.MULTILINE)
    for package in ("numpy", "array-api-compat", "ml_dtypes"):
        version = re.escape(found["packages"][package])
        assert re.search(rf"^{package} +{version}$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libcudart.so.13: not found')", "ImportError: libcudart.so.13"),
        ("raise RuntimeError('built\\nfor another NumPy')", "RuntimeError: built for another"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError"),  # a module without any of CuPy's names
    ],
)
def test_info_with_a_broken_cupy(source: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(source)
    done = command("info", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    state = json.loads(done.stdout)["libraries"]["cupy"]
    assert not state["usable"]
    assert reason in state["reason"]
    assert command("info", PYTHONPATH=str(tmp_path)).returncode == 0


class Answering(Runtime):
    """A runtime of one GPU that says what `info` asks for."""

    count = 1

    def driverGetVersion(self) -> int:
        return 13010

    def runtimeGetVersion(self) -> int:
        return 12090

    def getDeviceProperties(self, number: int) -> dict:
        return {"name": b"A GPU", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}

    def memGetInfo(self) -> tuple[int, int]:
        return 79 << 30, 80 << 30


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    stand_in = Cupy()
    stand_in.__version__ = "14.0.1"
    stand_in.cuda.runtime = Answering()
    stand_in.cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: (13, 1))
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    return stand_in


def test_info_with_a_gpu(
    cupy: Cupy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/somewhere/else")
    found = info_json(capsys)
    assert found["libraries"]["cupy"] == {"usable": True, "reason": None}
    assert found["packages"]["cupy"] == "14.0.1"
    assert found["cuda"] == {"driver": "13.1", "runtime": "12.9", "nvrtc": "13.1"}
    assert found["device"]["name"] == "A GPU"
    assert found["device"]["compute_capability"] == "9.0"
    assert found["kernel_cache"] == "/somewhere/else"
    text = info_text(capsys)
    assert "0: A GPU" in text
    assert "80.0 GiB, 79.0 GiB free" in text


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (0, "no CUDA driver answers: "),
        (13010, "the CUDA driver answers, but no GPU can be used: "),
    ],
)
def test_info_tells_a_missing_driver_from_a_missing_gpu(
    cupy: Cupy, driver: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cupy.cuda.runtime.count = 0
    cupy.cuda.runtime.driverGetVersion = lambda: driver
    found = info_json(capsys)
    assert found["libraries"]["cupy"]["reason"].startswith(reason)
    assert found["device"] is None
    assert reason in info_text(capsys)


def test_info_survives_questions_that_fail(cupy: Cupy, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise OSError("no answer")

    cupy.cuda.nvrtc.getVersion = fails
    cupy.cuda.runtime.getDeviceProperties = fails
    found = info_json(capsys)
    assert found["cuda"]["nvrtc"] == found["device"]["name"] == "unknown (OSError: no answer)"
    assert "unknown (OSError: no answer)" in info_text(capsys)


# -- where the output goes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["info"], ["selftest"], ["bench", "--quick", "--rounds", "1"], ["bench", "--help"]],
)
def test_piped_output_is_plain(arguments: list[str]) -> None:
    done = command(*arguments, FORCE_COLOR="1")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.endswith("\n")
    assert not CONTROL.search(done.stdout)
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def on_a_terminal(arguments: list[str]) -> tuple[int, str, str]:
    """Status, standard output (a pipe), and what standard error shows on a terminal."""
    import fcntl
    import pty
    import struct
    import termios

    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyops", *arguments],
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("TQDM_")},
    )
    os.close(end)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    assert process.stdout is not None
    with process.stdout:  # a few kilobytes, which the pipe holds
        out = process.stdout.read()
    return process.wait(), out, shown.decode()


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals")
@pytest.mark.parametrize("arguments", [["selftest"], ["bench", "--quick", "--rounds", "1"]])
def test_a_terminal_gets_a_progress_bar_and_standard_output_stays_plain(
    arguments: list[str],
) -> None:
    pytest.importorskip("tqdm")
    status, out, shown = on_a_terminal(arguments)
    assert status == 0
    assert re.search(rf"\r{arguments[0]}: +\d+%\|.*\| *\d+/\d+ \[", shown)
    assert "modulate" in shown  # what is being worked on
    assert "Traceback" not in shown
    assert not CONTROL.search(out)
