"""What README and examples show is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupyops

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_of_the_readme_runs_from_top_to_bottom() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
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
