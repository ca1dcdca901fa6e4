"""What README, manual and examples show is true."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyops
from cupyops import _exp_segsum, _modulate
from libraries import require_gpu
from pages import PAGES, ROOT, fences, run_page
from simulated import plan_of

README = (ROOT / "README.md").read_text()
MANUAL = [page for page in PAGES if page.parent.name == "docs"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    run_page(page)


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_on_a_gpu(page: Path) -> None:
    require_gpu()
    run_page(page, gpu=True)


def test_a_page_with_a_wrong_result_or_error_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for code in ("```python\nassert 1 == 2\n```\n", "```pycon\n>>> 1 + 1\n3\n```\n"):
        page.write_text(code)
        with pytest.raises(AssertionError):
            run_page(page)
    page.write_text("<!-- gpu -->\n```python\nassert 1 == 2\n```\n")
    run_page(page)
    with pytest.raises(AssertionError):
        run_page(page, gpu=True)


def test_every_fence_with_python_is_one_that_is_run() -> None:
    for page in PAGES:
        opened = re.findall(r"^\s*(?:```|~~~)\{?(?:py|code)\S*", page.read_text(), re.MULTILINE)
        assert len(opened) == len(fences(page)), page


def test_the_rules_for_the_size_of_a_workspace_are_those_of_the_plans() -> None:
    names: dict[str, Any] = run_page(ROOT / "docs" / "two_phase.md")
    spec = partial(cupyops.ArraySpec, library="cupy", device=0)
    for dtype, itemsize in (("float16", 4), ("float32", 4), ("float64", 8)):
        for b, length, d in [(1, 64, 8), (1, 65, 7), (2, 64, 8), (3, 300, 33), (2, 256, 1152)]:
            x = spec((b, length, d), dtype)
            for shape, shared in (((b, d), False), ((d,), True)):
                row = spec(shape, dtype)
                for rows in ({"scale": row}, {"scale": row, "shift": row}):
                    inputs = {"x": x, "grad_output": x, **rows}
                    plan = plan_of(_modulate._MODULATE_BACKWARD, inputs, None, False)
                    size = names["modulate_backward_workspace"](
                        b, length, d, gradients=len(rows), shared=shared, itemsize=itemsize
                    )
                    assert plan.workspace_size == size, (dtype, x.shape, shape)
        for shape in [(3, 8), (2, 320), (2, 321), (5, 1000), (1, 2048), (2, 4096)]:
            matrices = spec((*shape, shape[1]), dtype)
            inputs = {"y": matrices, "grad_output": matrices}
            plan = plan_of(_exp_segsum._EXP_SEGSUM_BACKWARD, inputs)
            size = names["exp_segsum_backward_workspace"](*shape, itemsize=itemsize)
            assert plan.workspace_size == size, (dtype, shape)


def test_the_readme_leads_to_results() -> None:
    names = run_page(ROOT / "README.md")
    grads = names["grads"]
    assert isinstance(grads, cupyops.ModulateGrads)
    np.testing.assert_array_equal(names["out"], names["decay"])


def test_the_error_that_the_readme_quotes_is_real() -> None:
    (quoted,) = re.findall(r"^```text\n(.*)\.\.\.\n```", README, re.MULTILINE)
    x = np.ones((2, 5, 4), np.float32)
    with pytest.raises(ValueError, match=f"^{re.escape(quoted)}"):
        cupyops.modulate_backward(x, grad_output=x, scale=x[:, 0, :3])


def test_every_layout_of_the_support_table_is_accepted() -> None:
    rows = [line for line in README.splitlines() if re.match(r"\| .*(scale|shared|row)", line)]
    table = " ".join(rows)
    forms = set(re.findall(r"\(([BLD1, ]+)\)", table))
    assert len(forms) == 7
    sizes = {"B": 2, "L": 3, "D": 4, "1": 1}
    x = np.ones((2, 3, 4), np.float32)
    for form in forms:
        scale = np.ones([sizes[axis] for axis in re.findall(r"[BLD1]", form)], np.float32)
        assert (
            cupyops.modulate_backward(x, grad_output=x, scale=scale).grad_scale.shape == scale.shape
        )


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (pattern,) = re.findall(r"grep -E '(.*?)' README\.md", script)
    commands = [line for line in README.splitlines() if re.search(pattern, line)]
    assert len(commands) == 1


@pytest.mark.parametrize("example", sorted((ROOT / "docs" / "examples").glob("*.py")))
def test_examples_run(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
