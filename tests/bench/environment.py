"""On what machine, with what libraries, and when: the page that belongs to every figure."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.cases import THREADS
from cupyops.cli import info

BUSY = 0.5
"""Load from which figures are suspect."""


def collect(script: str, versions: Mapping[str, str]) -> dict[str, Any]:
    known = info.collect()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "command": shlex.join(["python", f"tests/bench/{script}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "caches": caches(),
        "processors": known["cpu_count"],
        "threads": THREADS,
        "load_before": load,
        "platform": known["platform"],
        "python": known["python"],
        "cupyops": known["cupyops"],
        "packages": {**known["packages"], **versions},
        "compiler": compiler(),
    }


def cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def caches() -> str:
    """Of the first processor, with the number of processors that share each."""
    found = []
    for directory in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = ("".join(_lines(directory / n)) for n in ("type", "level", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def available_bytes() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def compiler() -> str:
    """That torch.compile uses."""
    try:
        done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no g++"
    return done.stdout.splitlines()[0]


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def as_lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and text of everything that is worth a line."""
    packages = [f"{name} {version}" for name, version in found["packages"].items() if version]
    lines = [
        ("command", found["command"]),
        ("date", found["date"]),
        ("processor", f"{found['cpu']}, {found['processors']} of them usable; {found['caches']}"),
        (
            "threads",
            f"at most {found['threads']} for every contender that has threads; those of OpenMP "
            "(torch, numba) wait without spinning",
        ),
        ("system", f"{found['platform']}, {found['compiler']}"),
        ("versions", ", ".join([f"cupyops {found['cupyops']}", f"Python {found['python']}"])),
        ("libraries", ", ".join(packages)),
    ]
    if found["load_before"] is not None:
        load = f"{found['load_before']:.2f} before the run"
        if found["load_before"] > BUSY:
            load += "; other programs were running, so times of threads may be off"
        lines.append(("load", load))
    return lines
