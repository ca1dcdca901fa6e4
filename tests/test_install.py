"""The package as a user gets it: built, installed in a clean environment, used elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path.name for path in (ROOT / "kernels_cu").iterdir())
USE = """
import numpy as np, cupyops
from cupyops import _kernels
ones = np.ones((4, 4), np.float32)
print(cupyops.exp_segsum_backward(ones, grad_output=ones).tolist())
print(cupyops.__file__)
print(_kernels.source_directory())
"""


def run(*command: str | Path, cwd: Path) -> str:
    # Nothing of this checkout may help: no PYTHONPATH, no user packages.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing behind in the tree."""
    copy = tmp_path_factory.mktemp("checkout") / "cupyops-src"
    names = ("cupyops", "kernels_cu", "tests", "docs", "pyproject.toml", "README.md", "LICENSE")
    copy.mkdir()
    for name in (*names, "CHANGELOG.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def distributions(checkout: Path) -> tuple[Path, Path]:
    """(wheel, sdist); the wheel is built from the sdist, as an installer would."""
    run(sys.executable, "-m", "build", checkout, cwd=checkout)
    (wheel,) = (checkout / "dist").glob("*.whl")
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    return wheel, sdist


def clean_python(directory: Path) -> Path:
    venv.create(directory, with_pip=True)
    return directory / ("Scripts" if os.name == "nt" else "bin") / "python"


def test_wheel_holds_package_types_licence_and_kernel_sources(
    distributions: tuple[Path, Path],
) -> None:
    names = set(zipfile.ZipFile(distributions[0]).namelist())
    for source in SOURCES:
        assert f"cupyops/kernels_cu/{source}" in names
    assert "cupyops/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "docs", "kernels_cu")) for name in names)


def test_sdist_holds_all_that_the_tests_need(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/oracle.py", "CHANGELOG.md", "README.md", "LICENSE", "pyproject.toml"} <= names
    assert {f"kernels_cu/{source}" for source in SOURCES} <= names


def test_installed_wheel_works_outside_the_checkout(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    python = clean_python(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", distributions[0], cwd=tmp_path)
    result, package, sources = run(python, "-c", USE, cwd=tmp_path).splitlines()
    assert result == "[0.0, 3.0, 4.0, 3.0]"
    assert Path(package).is_relative_to(tmp_path / "venv")
    assert Path(sources) == Path(package).parent / "kernels_cu"
    assert sorted(path.name for path in Path(sources).iterdir()) == SOURCES


def test_editable_install_finds_the_sources(checkout: Path, tmp_path: Path) -> None:
    python = clean_python(tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", "--editable", checkout, cwd=tmp_path)
    result, package, sources = run(python, "-c", USE, cwd=tmp_path).splitlines()
    assert result == "[0.0, 3.0, 4.0, 3.0]"
    assert Path(package).resolve() == (checkout / "cupyops" / "__init__.py").resolve()
    assert Path(sources).resolve() == (checkout / "kernels_cu").resolve()
