"""The arguments of all commands, with their help texts."""

from __future__ import annotations

import argparse

import cupyops
from cupyops.cli.backends import NAMES
from cupyops.cli.reference import FORMATS

PROG = "python -m cupyops"
OPERATORS = ("modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward")

INFO = f"""\
Say what is installed here, which array libraries can be used and, of one that cannot, why.
Never fails because something is missing.

examples:
  {PROG} info
  {PROG} info --json | python -m json.tool
"""
SELFTEST = f"""\
Run every operator in every dtype on the array libraries of this machine and compare each element
with a float64 reference, within the documented error bounds.

examples:
  {PROG} selftest
  {PROG} selftest --backend numpy --json

exit status: 0 if everything is right, 1 if anything is not.
"""
BENCH = f"""\
Time the operators against the same formulas written in plain NumPy (CuPy) lines. Every contender is
checked against float64 first; without a right result it gets no time.

examples:
  {PROG} bench                       all benchmark shapes in float32, about a minute
  {PROG} bench --quick               one small shape for each operator
  {PROG} bench --operator exp_segsum --dtype bfloat16 --shape 512x128 --rounds 15
  {PROG} bench --json results.json --plot results.png
  {PROG} bench --json - > results.json

Shapes are BxLxD for modulation, and number of segments x T for segment sums.
exit status: 0 if all results of cupyops are right, 1 if one is not.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Look at this installation of cupyops, test it, or time it.",
        epilog=f"'{PROG} COMMAND --help' describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"cupyops {cupyops.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_info(commands)
    _add_selftest(commands)
    _add_bench(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, short: str, text: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=short,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "info", "versions, array libraries, device", INFO)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _add_selftest(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    short = "check every operator against float64"
    parser = _command(commands, "selftest", short, SELFTEST)
    _add_backend(parser, "all that can be used here")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "bench", "time the operators against plain array code", BENCH)
    parser.add_argument(
        "--operator",
        action="append",
        choices=OPERATORS,
        metavar="NAME",
        help=f"{', '.join(OPERATORS)}; repeatable; default: all four",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=tuple(FORMATS),
        metavar="DTYPE",
        help=f"{', '.join(FORMATS)}; repeatable; default: float32",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shape",
        metavar="SHAPE",
        action="append",
        type=parse_shape,
        help="2x256x1152 or 512x128; repeatable; default: the benchmark shapes",
    )
    which.add_argument("--quick", action="store_true", help="one small shape for each operator")
    which.add_argument(
        "--all", action="store_true", help="all dtypes, not float32 alone; several minutes"
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="times each contender has its turn (default 7)"
    )
    parser.add_argument(
        "--out",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="write into arrays that are there already (default: --no-out, new arrays each time)",
    )
    _add_backend(parser, "cupy if a GPU can be used, else numpy")
    parser.add_argument(
        "--json", metavar="FILE", help="write all figures there; '-' prints them, and no table"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the rates, as .png, .svg or .pdf; needs matplotlib"
    )


def _add_backend(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--backend", choices=NAMES, help=f"the array library to use (default: {default})"
    )


def parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if len(shape) not in (2, 3):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; expected BxLxD, as 2x256x1152, or segments x T, as 512x128"
        )
    if any(length < 1 for length in shape):
        raise argparse.ArgumentTypeError(f"{text!r} has a length below 1")
    return shape


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
