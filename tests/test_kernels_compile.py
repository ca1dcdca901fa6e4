"""Every kernel instance compiles for every architecture, and its resources are as recorded.

The record is made anew, when a change of it is meant, by

    python tests/test_kernels_compile.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import simulated
from cupyops import _exp_segsum_device, _kernels, _launch, _modulate_device
from ptx import nvrtc
from simulated import SOURCES, instances

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
RECORD = Path(__file__).with_name("kernel_resources.json")
REGISTERS_OF_A_MULTIPROCESSOR = 65536


def resources(source: str, architecture: str) -> dict[str, dict[str, int]]:
    """Registers, spills, local and static shared memory of every instance of a source file."""
    names = instances(source)
    text = _kernels.source_text(source)
    made = nvrtc.compile_cubin(text, simulated.options(architecture), names, filename=source)
    noise = re.findall(r"^.*\b(?:warning|remark)\b.*$", made.log, re.IGNORECASE | re.MULTILINE)
    assert not noise, noise
    return {name: vars(made.resources[made.lowered[name]]).copy() for name in names}


def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_instances_compile_without_spills_and_as_recorded(source: str, architecture: str) -> None:
    found = resources(source, architecture)
    for name, use in found.items():
        assert use["spill_stores"] == use["spill_loads"] == use["stack"] == 0, (name, use)
        many = "exp_segsum_backward_rows" in name
        threads = _exp_segsum_device.MOST_THREADS if many else _launch.THREADS
        assert use["registers"] * threads <= REGISTERS_OF_A_MULTIPROCESSOR, (name, use)
        assert use["static_shared"] <= _kernels.DEFAULT_SHARED_BYTES, (name, use)
    recorded = record()
    version = list(nvrtc.version())
    assert version == recorded["nvrtc"], "another NVRTC than the record's: make the record anew"
    for name, use in found.items():
        expected = recorded["instances"][name][architecture]
        assert [use["registers"], use["static_shared"]] == expected, name


def test_the_record_has_nothing_else() -> None:
    known = {name for source in SOURCES for name in instances(source)}
    assert set(record()["instances"]) == known
    assert all(set(row) == set(ARCHITECTURES) for row in record()["instances"].values())


@pytest.mark.parametrize("source", SOURCES)
def test_sources_include_nothing(source: str) -> None:
    """CuPy's cache of compiled kernels does not see what an include brings in."""
    text = _kernels.source_text(source)
    assert "#include" not in text
    assert text.index('#line 1 "common.cuh"') < text.index(f'#line 1 "{source}"')


def test_errors_name_file_and_line() -> None:
    text = _kernels.source_text("modulate.cu").replace("enum { HAS_SCALE", "enumm { HAS_SCALE")
    line = (_kernels.source_directory() / "modulate.cu").read_text().split("enum {")[0].count("\n")
    with pytest.raises(nvrtc.CompileError, match=rf"modulate\.cu\({line + 1}\): error"):
        nvrtc.compile_ptx(text, simulated.options(simulated.TARGETS[0]), ())


CONSTANTS = {
    "modulate.cu": (_modulate_device, "HAS_SCALE", "ONE_PLUS_SCALE", "HAS_SHIFT"),
    "modulate_backward.cu": (
        _modulate_device,
        *("HAS_SCALE", "ONE_PLUS_SCALE", "WRITE_GRAD_INPUT"),
        *("NO_SUM", "PER_TOKEN", "CHUNK_SUMS", "FINAL"),
        "CHUNK_ROWS",
    ),
    "exp_segsum_backward.cu": (_exp_segsum_device, "BAND_ROWS"),
}


@pytest.mark.parametrize("source", CONSTANTS)
def test_constants_agree_with_the_launches(source: str) -> None:
    text = (_kernels.source_directory() / source).read_text()
    launches, *constants = CONSTANTS[source]
    for constant in constants:
        value = getattr(launches, constant)
        assert re.findall(rf"\b{constant} = (\d+)", text) == [str(value)], constant


@pytest.mark.parametrize("source", SOURCES)
def test_every_file_opens_with_what_it_does_to_the_bytes(source: str) -> None:
    text = (_kernels.source_directory() / source).read_text()
    head = text.split("\n\n")
    opening = "\n".join(part for part in head if part.startswith("//"))
    for topic in ("Grid", "Block", "Shared", "Bytes", "Order", "Layout"):
        assert re.search(rf"^// {topic}\b", opening, re.MULTILINE), topic


def main() -> None:
    rows: dict[str, dict[str, list[int]]] = {}
    for source in SOURCES:
        for architecture in ARCHITECTURES:
            print(f"{source} for {architecture}", file=sys.stderr)
            for name, use in resources(source, architecture).items():
                rows.setdefault(name, {})[architecture] = [use["registers"], use["static_shared"]]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    head = json.dumps(
        {"nvrtc": list(nvrtc.version()), "columns": ["registers per thread", "static shared bytes"]}
    )
    RECORD.write_text(f'{head[:-1]}, "instances": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
