"""The command line: ``python -m cupyops info | selftest | bench``.

Stands on top of the package; nothing imports it but ``cupyops.__main__``. Each command is a module
that is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from cupyops.cli.arguments import PROG, build_parser
from cupyops.cli.errors import CommandError

USAGE_ERROR = 2
INTERRUPTED = 130
"""As a shell reports a process that SIGINT ended."""
BROKEN_PIPE = 141
"""As a shell reports a process that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0: done, and nothing was wrong. 1: a result was wrong. 2: the arguments, or this machine, do
    not allow what was asked for.
    """
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help text or the error
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except CommandError as error:
        print(f"{PROG} {arguments.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"\n{PROG} {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE
    except OSError as error:  # a full disk behind the output, for one
        print(f"{PROG} {arguments.command}: error: {error.strerror or error}", file=sys.stderr)
        _silence_stdout()
        return USAGE_ERROR
    return status


def _silence_stdout() -> None:
    """Python flushes once more at exit, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: argparse.Namespace) -> int:
    status: int = importlib.import_module(f"cupyops.cli.{arguments.command}").run(arguments)
    return status
