"""Every operator is in every place that `docs/adding_an_operation.md` lists, under one name.

Operators are found in the package, not listed here: a new one fails until all places know it.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import itertools
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyops
import gpu_calls
import misuse
import simulated
import test_kernels_run
import test_plan
import test_public_api
import traffic
from bench import torch_formulas
from cupyops import _aclnn, _kernels, _launch, aclnn
from cupyops._plan import Operator, Plan
from cupyops.cli import arguments
from ptx import Module, memory, nvrtc
from simulated import plan_of
from support import DTYPE_NAMES, assert_same_bits, normal

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


class Entry(NamedTuple):
    module: ModuleType
    operator: Operator

    @property
    def name(self) -> str:
        return self.operator.name


def operators() -> dict[str, Entry]:
    """Every operator that a module of the package defines, by name."""
    found: dict[str, Entry] = {}
    for info in pkgutil.iter_modules(cupyops.__path__, "cupyops."):
        if info.name.endswith("__main__"):  # importing it would run it
            continue
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            # Where it is planned is where it is defined; other modules import it.
            if isinstance(value, Operator) and value.build.__module__ == info.name:
                found[value.name] = Entry(module, value)
    return found


OPERATORS = operators()


@pytest.fixture(params=OPERATORS)
def entry(request: pytest.FixtureRequest) -> Entry:
    return OPERATORS[request.param]


def planned(name: str) -> list[Plan]:
    """Plans of all cases that the checked runs of the kernels have for an operator."""
    return [
        plan_of(case.operator, case.inputs, None, *case.options)
        for case in test_kernels_run.cases("float32")
        if case.operator.name == name
    ]


def test_the_four_operators_are_found() -> None:
    known = {"modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"}
    assert known <= set(OPERATORS)


# -- the package --------------------------------------------------------------------------------


def test_function_and_plan_are_public_and_take_what_the_operator_takes(entry: Entry) -> None:
    name, operator = entry.name, entry.operator
    assert {name, f"plan_{name}"} <= set(cupyops.__all__)
    function = inspect.signature(getattr(cupyops, name)).parameters
    assert inspect.signature(getattr(cupyops, f"plan_{name}")).parameters == function
    assert tuple(function)[: len(operator.inputs)] == operator.inputs
    assert tuple(function)[-1] == "out"
    first, *others = function.values()
    assert first.kind is inspect.Parameter.POSITIONAL_ONLY
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in others)
    may_be_absent = {p.name for p in function.values() if p.default is None}
    assert may_be_absent == {*operator.optional, "out"}
    (plan, *_) = planned(name)
    options = tuple(function)[len(operator.inputs) : -1]
    assert tuple(option for option, _ in plan.options) == options


def test_several_outputs_are_a_public_named_tuple(entry: Entry) -> None:
    if entry.operator.result is None:
        assert entry.operator.outputs == ("out",)
    else:
        assert entry.operator.result.__name__ in cupyops.__all__
        assert entry.operator.outputs == getattr(entry.operator.result, "_fields", None)


@pytest.mark.parametrize(
    "function", [f for f in vars(_aclnn).values() if type(f) is _aclnn.Function]
)
def test_aclnn_functions_take_the_tensors_of_their_operator(function: _aclnn.Function) -> None:
    operator = function.operator
    first = inspect.signature(getattr(aclnn, f"{function.name}GetWorkspaceSize"))
    assert tuple(first.parameters) == function.arguments
    tensors = {operator.label(name) for name in (*operator.inputs, *operator.outputs)}
    assert tensors == set(function.arguments)
    assert {function.name, f"{function.name}GetWorkspaceSize"} <= set(aclnn.__all__)


# -- the kernels --------------------------------------------------------------------------------


def test_kernel_files_are_named_after_operators() -> None:
    files = {path.name for path in _kernels.source_directory().glob("*.cu")}
    assert files == {f"{name}.cu" for name in OPERATORS} == set(simulated.SOURCES)


def test_launches_use_the_kernels_of_the_operators_own_file(entry: Entry) -> None:
    kernels = [
        kernel for plan in planned(entry.name) for kernel, _ in _kernels.kernels_of(plan.launches)
    ]
    assert kernels, "tests/test_kernels_run.py: no case launches anything"
    for kernel in kernels:
        assert kernel.source == f"{entry.name}.cu"
        assert re.match(rf"{entry.name}(_\w+)?<", kernel.name), kernel
        assert kernel.name in simulated.instances(kernel.source)


def test_resources_are_recorded(entry: Entry) -> None:
    record = json.loads((ROOT / "tests" / "kernel_resources.json").read_text())["instances"]
    assert set(simulated.instances(f"{entry.name}.cu")) <= set(record)


# -- tests and benchmarks -----------------------------------------------------------------------


def traffic_cases() -> set[str]:
    """Operators whose traffic is counted; nothing is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "count", lambda operator, *_: operator.name)
        patch.setattr(traffic, "sectors_of", lambda *_: 0)
        patch.setattr(traffic, "_ones", lambda shape, _: np.broadcast_to(np.float32(1), shape))
        rows = inspect.getmembers(traffic, inspect.isfunction)
        makers = [make for name, make in rows if name.endswith("_rows")]
        return {name for make in makers for name in make("float32")}


def benchmark_cases() -> set[str]:
    path = ROOT / "tests" / "bench" / "gpu_cases.py"
    spec = importlib.util.spec_from_file_location("gpu_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(module.OPERATORS)


COVERAGE: dict[str, Callable[[], set[str]]] = {
    "cupyops/cli/arguments.py": lambda: set(arguments.OPERATORS),
    "tests/traffic.py": traffic_cases,
    "tests/bench/gpu_cases.py": benchmark_cases,
    "tests/bench/torch_formulas.py": lambda: set(torch_formulas.TORCH),
    "tests/test_kernels_run.py": lambda: {
        case.operator.name for case in test_kernels_run.cases("float32")
    },
    "tests/gpu_calls.py": lambda: set(gpu_calls.OPERATORS),
    "tests/misuse.py": lambda: set(misuse.FUNCTIONS),
    "tests/test_plan.py": lambda: set(test_plan.OPERATORS),
    "tests/test_public_api.py": lambda: set(test_public_api.OPERATORS),
}


@pytest.mark.parametrize("place", COVERAGE)
def test_tests_and_benchmarks_cover_every_operator(place: str) -> None:
    assert COVERAGE[place]() == set(OPERATORS)


# -- README, change log and docs ----------------------------------------------------------------


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_readme_and_change_log_name_every_operator(entry: Entry) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    assert f"cupyops.{entry.name}(" in code, "the README does not show it in use"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"`{entry.name}`", changes), "the change log does not mention it"


def titles(text: str) -> list[str]:
    """The headings of a page, without those that are comments in code."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.*)$", prose, re.MULTILINE)


GENERAL = {
    "api.md",
    "aclnn.md",
    "benchmark_tables.md",
    "adding_an_operation.md",
    "benchmarks.md",
    "index.md",
    "kernels.md",
}


def test_a_page_has_a_heading_for_the_family_and_shows_the_operator(entry: Entry) -> None:
    """The heading is that of the family's section in the reference."""
    reference = page("api.md")
    sections_of_reference = re.split(r"^## ", reference, flags=re.MULTILINE)[1:]
    directive = rf"^\.\. autofunction:: (cupyops\.)?{entry.name}$"
    (family,) = (
        section.partition("\n")[0]
        for section in sections_of_reference
        if re.search(directive, section, re.MULTILINE)
    )
    about = [
        path.name
        for path in sorted(DOCS.glob("*.md"))
        if path.name not in GENERAL
        and any(family.lower() in title.lower() for title in titles(page(path.name)))
        and re.search(rf"\bcupyops\.{entry.name}\(", page(path.name))
    ]
    assert about, f"no page with {family!r} in a heading shows cupyops.{entry.name}(...)"


def listed(reference: str) -> set[str]:
    """Names that an API page documents by an autodoc directive."""
    return set(
        re.findall(r"^\.\. auto\w+:: (?:cupyops\.)?(?:aclnn\.)?(\w+)", reference, re.MULTILINE)
    )


def test_the_api_pages_list_every_public_name() -> None:
    assert listed(page("api.md")) >= set(cupyops.__all__) - {"__version__"}
    constants = set(aclnn.aclnnStatus.__members__)
    assert listed(page("aclnn.md")) >= set(aclnn.__all__) - constants


def test_the_page_on_adding_an_operation_names_every_place() -> None:
    text = page("adding_an_operation.md")
    for place in (*COVERAGE, "tests/kernel_resources.json", "CHANGELOG.md", "docs/api.md"):
        assert f"`{place}`" in text, place
    files = set(re.findall(r"`((?:cupyops|kernels_cu|tests|docs)/[\w/.]+\.\w+)`", text))
    new = {name for name in files if "scale_rows" in name}
    assert len(new) >= 3
    missing = {name for name in files - new if not (ROOT / name).is_file()}
    assert not missing


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_the_example_on_that_page_has_equal_bits_on_numpy_and_as_a_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text = page("adding_an_operation.md")
    (kernel,) = re.findall(r"^```text\n(// scale_rows.*?)^```", text, re.MULTILINE | re.DOTALL)
    (module,) = re.findall(r'^```python\n(""".*?)^```', text, re.MULTILINE | re.DOTALL)
    code: dict[str, Any] = {"__name__": "cupyops._scale_rows"}
    exec(compile(module, "cupyops/_scale_rows.py", "exec"), code)

    common = (_kernels.source_directory() / _kernels.COMMON).read_text(encoding="utf-8")
    target = simulated.TARGETS[0]
    expression = f"scale_rows<{_launch.C_TYPES[name]}>"
    made = nvrtc.compile_ptx(f"{common}\n{kernel}", simulated.options(target), [expression])
    monkeypatch.setattr(simulated, "module", lambda *_: Module(made.ptx, made.lowered))

    rng = np.random.default_rng(1)
    x = memory.copy(normal(rng, (300, 7), name))
    weight = memory.copy(normal(rng, (300,), name))
    plan = plan_of(code["_SCALE_ROWS"], {"x": x, "weight": weight})
    outs = simulated.new_outs(plan)
    simulated.run_checked(plan, {"x": x, "weight": weight}, outs, target=target)
    assert_same_bits(outs["out"], code["scale_rows"](x, weight=weight))


# -- docstrings ---------------------------------------------------------------------------------


def public_objects() -> dict[str, Any]:
    """Functions and classes by dotted name; constants have no docstring of their own."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (cupyops, aclnn)
        for name in module.__all__
        if callable(getattr(module, name))
    }


PUBLIC = public_objects()
DOCUMENTED = PUBLIC | {"cupyops.Plan.run": Plan.run}
FUNCTIONS = {name: value for name, value in DOCUMENTED.items() if not inspect.isclass(value)}
OPERATIONS = [
    name
    for name in FUNCTIONS
    if name.rpartition(".")[2].removeprefix("plan_") in OPERATORS
    or re.match(r"cupyops\.aclnn\.aclnn", name)
]


def sections(text: str) -> dict[str, str]:
    """The sections of a numpydoc docstring, by title."""
    titles = list(re.finditer(r"^(\w[\w ]*)\n(-+)$", text, re.MULTILINE))
    for title in titles:
        assert len(title[1]) == len(title[2]), f"underline of {title[1]}"
    ends = [title.start() for title in titles[1:]] + [len(text)]
    return {t[1]: text[t.end() : end].strip() for t, end in zip(titles, ends, strict=True)}


def documented_parameters(body: str) -> set[str]:
    heads = re.findall(r"^([*\w]+(?:, [*\w]+)*) : ", body, re.MULTILINE)
    return {name.lstrip("*") for head in heads for name in head.split(", ")}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_a_summary_and_an_example(name: str) -> None:
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    summary = text.partition("\n\n")[0]
    assert summary, "no docstring"
    assert "\n" not in summary, "the summary is longer than a line"
    assert summary.endswith((".", ";")) or summary.endswith("``."), summary
    assert ">>> " in sections(text).get("Examples", ""), "no example"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_parameters_returns_and_raises(name: str) -> None:
    found = sections(inspect.getdoc(FUNCTIONS[name]) or "")
    parameters = set(inspect.signature(FUNCTIONS[name]).parameters)
    if name == "cupyops.Plan.run":
        parameters.remove("self")
    assert documented_parameters(found.get("Parameters", "")) == parameters
    assert found["Returns"]
    if not name.startswith("cupyops.aclnn."):  # those return a status
        assert {"TypeError", "ValueError"} <= set(
            re.findall(r"^\w+$", found["Raises"], re.MULTILINE)
        )


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_state_formula_source_shapes_and_dtypes(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    notes = sections(text)["Notes"]
    assert re.search(r"``[^`]*\w(\[\w+(, \w+)*\])? = [^`]+``", notes), "no formula"
    assert re.search(r"arXiv:\d{4}\.\d{5}|Source: ``", notes.replace("\n", " ")), "no source"
    if not is_phase_two(name):  # it takes no tensors
        assert re.search(r"\(([A-Z]|\.\.\.), ", sections(text)["Parameters"]), "no shape"
        assert re.search(r"float32", text), "no dtypes"


def is_phase_two(name: str) -> bool:
    return name.startswith("cupyops.aclnn.") and not name.endswith("GetWorkspaceSize")


def test_fields_methods_and_members_of_public_classes_are_described() -> None:
    for name, value in PUBLIC.items():
        if not inspect.isclass(value):
            continue
        members = {key for key in vars(value) if not key.startswith("_")}
        if value is cupyops.ArraySpec or value is cupyops.ModulateGrads:
            body = sections(inspect.getdoc(value) or "")["Parameters"]
            fields = {*inspect.signature(value).parameters}
            assert documented_parameters(body) == fields, name
            members -= {*fields, "count", "index"}
        for member in members - {*attribute_docstrings(value.__name__)}:
            method = inspect.getattr_static(value, member)
            assert isinstance(method, property) or inspect.isfunction(method), f"{name}.{member}"
            assert method.__doc__, f"{name}.{member}"


def attribute_docstrings(name: str) -> Iterator[str]:
    """Names in the body of a class of the package that a string follows, as Sphinx reads them."""
    for path in (ROOT / "cupyops").glob("*.py"):
        for cls in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(cls, ast.ClassDef) and cls.name == name:
                for one, other in itertools.pairwise(cls.body):
                    target = one.target if isinstance(one, ast.AnnAssign) else one
                    target = one.targets[0] if isinstance(one, ast.Assign) else target
                    text = other.value if isinstance(other, ast.Expr) else None
                    if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                        yield target.id


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    objects = PUBLIC | {"cupyops": cupyops, "cupyops.aclnn": aclnn}
    found = {
        test.name: test
        for name, value in objects.items()
        for test in finder.find(value, name, module=False, globs={})  # type: ignore[arg-type]
        if test.examples and not inspect.ismodule(value)
    }
    return list(found.values())


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_examples_run(example: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_every_public_name_has_an_example_that_is_run() -> None:
    assert {test.name for test in examples()} >= set(DOCUMENTED)
