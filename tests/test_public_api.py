"""What the package exports, what importing it costs, and which room may import which."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupyops

ROOT = Path(__file__).parent.parent
OPERATORS = ["modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"]

# A room imports rooms of a lower level only.
LEVELS = {
    "__main__": 8,
    "aclnn": 7,
    "_dask": 7,
    "_dask_blocks": 6,
    "torch": 7,
    "_torch_ops": 6,
    "_aclnn": 6,
    "__init__": 6,
    "_modulate": 5,
    "_exp_segsum": 5,
    "_torch_arrays": 5,
    "_torch_modes": 2,
    "_plan": 4,
    "_modulate_device": 4,
    "_exp_segsum_device": 4,
    "_modulate_host": 4,
    "_modulate_sums": 3,
    "_modulate_rows": 0,
    "_exp_segsum_host": 3,
    "_exp_segsum_panels": 0,
    "_kernels": 3,
    "_host": 2,
    "_launch": 2,
    "_checks": 1,
    "_arrays": 0,
    "_convert": 0,
    "_threads": 0,
    "_status": 0,
}


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_room_has_a_level() -> None:
    assert {path.stem for path in (ROOT / "cupyops").glob("*.py")} == set(LEVELS)


@pytest.mark.parametrize("room", LEVELS)
def test_imports_go_down_only(room: str) -> None:
    for module in imports_of(ROOT / "cupyops" / f"{room}.py"):
        package, _, rest = module.partition(".")
        name = rest.partition(".")[0]
        if package == "cupyops" and name in LEVELS:
            assert LEVELS[name] < LEVELS[room], f"{room} imports {module}"


def test_the_command_line_stands_on_top() -> None:
    """Nothing below it imports it, and it sees of the package what its users see, and devices."""
    for path in (ROOT / "cupyops").glob("*.py"):
        if path.stem != "__main__":
            assert not any(name.startswith("cupyops.cli") for name in imports_of(path)), path
    allowed = {"cupyops", "cupyops._arrays", "cupyops._kernels"}
    for path in (ROOT / "cupyops" / "cli").glob("*.py"):
        for name in imports_of(path):
            if name.startswith("cupyops._"):
                assert ".".join(name.split(".")[:2]) in allowed, f"{path.name} imports {name}"


def test_importing_and_using_numpy_loads_no_other_array_library() -> None:
    code = (
        "import sys, numpy as np, cupyops\n"
        "x = np.ones((2, 3, 4), np.float32)\n"
        "cupyops.modulate_backward(x, grad_output=x, scale=x, shift=x)\n"
        "cupyops.exp_segsum_backward(cupyops.exp_segsum(x), grad_output=cupyops.exp_segsum(x))\n"
        "print({'cupy', 'torch', 'dask', 'jax', 'argparse', 'tqdm'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "set()"


def own_import_milliseconds(bytecode: Path) -> float:
    """What ``import cupyops`` adds to its dependencies, by -X importtime (cumulative)."""
    code = "import numpy, array_api_compat, ml_dtypes; import cupyops"
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, as for any user
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    (line,) = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \| cupyops$", done.stderr, re.MULTILINE)
    return int(line) / 1000


def test_importing_adds_less_than_30_ms_to_the_dependencies(tmp_path: Path) -> None:
    # The least of several: a busy machine only ever adds.
    assert min(own_import_milliseconds(tmp_path) for _ in range(5)) < 30


def test_all_names_exist_and_nothing_else_is_public() -> None:
    public = {
        name
        for name, value in vars(cupyops).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | {"__version__"} == set(cupyops.__all__)
    assert sorted(cupyops.__all__) == sorted(set(cupyops.__all__))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_plan_takes_the_arguments_of_its_function(name: str) -> None:
    function = inspect.signature(getattr(cupyops, name))
    plan = inspect.signature(getattr(cupyops, f"plan_{name}"))
    assert function.parameters == plan.parameters


@pytest.mark.parametrize("name", OPERATORS)
def test_arrays_but_the_first_are_keyword_only(name: str) -> None:
    first, *others = inspect.signature(getattr(cupyops, name)).parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_ONLY
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in others)
