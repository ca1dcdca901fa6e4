"""Executors of the aclnn layer: how often they run, what a failure means, threads."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from aclnn_calls import assert_failed, eager, memory, phase_one, phase_two, ready
from aclnn_table import FUNCTIONS, INNER, INVALID, NULLPTR, OUTPUTS, RUNTIME, SUCCESS, tensors
from cupyops import _aclnn, _plan, aclnn
from support import assert_same_bits, in_threads

# -- executors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_executor_runs_once(function: str) -> None:
    executor, given = ready(function)
    assert phase_two(function, None, 0, executor, None) == SUCCESS
    first = memory(given)
    for name in OUTPUTS:
        if name in given:
            given[name][...] = 55
    before = memory(given)
    text = assert_failed(
        function, phase_two(function, None, 0, executor, None), INVALID, "executor"
    )
    assert "was already used" in text
    assert memory(given) == before != first
    assert "was already used" in repr(executor)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_repeatable_executor_runs_until_it_is_destroyed(function: str) -> None:
    executor, given = ready(function)
    for _ in range(2):
        assert aclnn.aclSetAclOpExecutorRepeatable(executor) == SUCCESS
    for seed in range(3):
        for name, value in tensors(function, seed=seed).items():
            given[name][...] = value
        assert phase_two(function, None, 0, executor, None) == SUCCESS
        for name, want in eager(function, given).items():
            assert_same_bits(given[name], want)
    assert function in repr(executor)
    assert aclnn.aclDestroyAclOpExecutor(executor) == SUCCESS
    before = memory(given)
    status = phase_two(function, None, 0, executor, None)
    assert "was destroyed" in assert_failed(function, status, INVALID, "executor")
    assert memory(given) == before


LIFE = ["aclSetAclOpExecutorRepeatable", "aclDestroyAclOpExecutor"]


@pytest.mark.parametrize("name", LIFE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_executor_that_has_ended_is_refused(function: str, name: str) -> None:
    executor, _ = ready(function)
    assert phase_two(function, None, 0, executor, None) == SUCCESS
    assert "already used" in assert_failed(name, getattr(aclnn, name)(executor), INVALID)
    executor, _ = ready(function)
    assert aclnn.aclDestroyAclOpExecutor(executor) == SUCCESS
    assert "was destroyed" in assert_failed(name, getattr(aclnn, name)(executor), INVALID)


@pytest.mark.parametrize("name", [*LIFE, *FUNCTIONS])
def test_what_is_no_executor_is_refused(name: str) -> None:
    def call(executor: Any) -> Any:
        function = getattr(aclnn, name)
        return function(executor) if name in LIFE else function(None, 0, executor, None)

    assert_failed(name, call(None), NULLPTR, "executor")
    unmade = object.__new__(aclnn.aclOpExecutor)
    subclass = type("Mine", (aclnn.aclOpExecutor,), {})()
    for garbage in (0, "executor", [], np.zeros(3), unmade, aclnn.aclOpExecutor(), subclass):
        assert_failed(name, call(garbage), INVALID, "executor")


def test_an_executor_of_another_function_is_refused_and_not_used_up() -> None:
    for function in FUNCTIONS:
        executor, given = ready(function)
        before = memory(given)
        for other in set(FUNCTIONS) - {function}:
            status = phase_two(other, None, 0, executor, None)
            assert f"is of {function};" in assert_failed(other, status, INVALID, "executor")
        assert memory(given) == before
        assert phase_two(function, None, 0, executor, None) == SUCCESS


def test_an_executor_is_bound_to_its_process_and_lets_go_of_its_tensors() -> None:
    for end in (aclnn.aclDestroyAclOpExecutor, lambda e: aclnn.aclnnExpSegsum(None, 0, e, None)):
        executor, given = ready("aclnnExpSegsum")
        with pytest.raises(TypeError, match="may run only once"):
            copy.copy(executor)
        alive = [weakref.ref(value) for value in given.values()]
        given.clear()
        gc.collect()
        assert all(ref() is not None for ref in alive)
        assert end(executor) == SUCCESS
        gc.collect()
        assert all(ref() is None for ref in alive)


# -- failures that are nobody's argument --------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("launch failed"), RUNTIME),
        *((kind("x"), INNER) for kind in (KeyError, TypeError, ValueError)),
        *((kind(), INNER) for kind in (MemoryError, AssertionError)),
    ],
    ids=repr,
)
def test_an_error_while_running_is_never_blamed_on_an_argument(error, expected, monkeypatch):
    def execute(*args: Any) -> None:
        raise error

    executor, _ = ready("aclnnModulate")
    with monkeypatch.context() as patch:
        patch.setattr(_plan.Plan, "execute", execute)
        status = phase_two("aclnnModulate", None, 0, executor, None)
    assert str(error) in assert_failed("aclnnModulate", status, expected)
    # it may have written, so it counts as the one run
    assert_failed("aclnnModulate", phase_two("aclnnModulate", None, 0, executor, None), INVALID)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise error

    executor, given = ready("aclnnModulate")
    with monkeypatch.context() as patch:
        patch.setattr(_plan.Plan, "execute", interrupt)
        with pytest.raises(error):
            phase_two("aclnnModulate", None, 0, executor, None)
        patch.setattr(_aclnn, "plan_for", interrupt)
        with pytest.raises(error):
            phase_one("aclnnModulate", given)
    assert_failed("aclnnModulate", phase_two("aclnnModulate", None, 0, executor, None), INVALID)


def test_an_error_while_planning_is_inner_or_of_the_driver(monkeypatch) -> None:
    for error, expected in ((RuntimeError("no driver"), RUNTIME), (KeyError("x"), INNER)):

        def plan(*args: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(_aclnn, "plan_for", plan)
        status, size, executor = phase_one("aclnnModulate", tensors("aclnnModulate"))
        assert str(error) in assert_failed("aclnnModulate", status, expected)
        assert (size, executor) == (0, None)


# -- the text of the last failure ---------------------------------------------------------------


def test_the_text_belongs_to_a_thread_and_stays_until_the_next_failure() -> None:
    seen = []

    def work(name: str) -> None:
        seen.append(aclnn.aclGetRecentErrMsg())
        phase_one("aclnnModulate", tensors("aclnnModulate", {name: None}))
        barrier.wait()
        text = aclnn.aclGetRecentErrMsg()
        ready("aclnnModulate")  # a success leaves it alone, and so does reading
        assert aclnn.aclGetRecentErrMsg() == text
        seen.append(text)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in ("self", "out")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = {
        f"aclnnModulate: {n} is None; expected a numpy.ndarray or cupy.ndarray"
        for n in ("self", "out")
    }
    assert set(seen) == {""} | texts


# -- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_executor_runs_once_in_many_threads(function: str, monkeypatch) -> None:
    check_run = _plan.Plan.check_run

    def slow_check(*args: Any) -> Any:
        time.sleep(0.002)  # all threads get as far as this, if nothing holds them back
        return check_run(*args)

    monkeypatch.setattr(_plan.Plan, "check_run", slow_check)
    sizes = {"B": 8, "L": 200, "D": 64, "N": 8, "H": 8, "T": 32}
    for _ in range(5):
        executor, given = ready(function, tensors(function, sizes=sizes))

        def work(i: int, executor: Any = executor) -> tuple[Any, str]:
            status = phase_two(function, None, 0, executor, None)
            return status, aclnn.aclGetRecentErrMsg()

        results = in_threads(8, work)
        assert sorted(status for status, _ in results) == [SUCCESS, *[INVALID] * 7]
        assert all("already used" in text for status, text in results if status)
        for name, want in eager(function, given).items():
            assert_same_bits(given[name], want)


def test_a_repeatable_executor_runs_in_many_threads_until_one_destroys_it() -> None:
    executor, given = ready("aclnnModulate")
    aclnn.aclSetAclOpExecutorRepeatable(executor)

    def work(i: int) -> list[Any]:
        runs = [phase_two("aclnnModulate", None, 0, executor, None) for _ in range(50)]
        return runs if i else [*runs, aclnn.aclDestroyAclOpExecutor(executor)]

    first, *others = in_threads(6, work)
    assert first == [SUCCESS] * 51
    for runs in others:
        assert set(runs) <= {SUCCESS, INVALID}
        assert runs == sorted(runs), "ran after it was destroyed"
    for name, want in eager("aclnnModulate", given).items():
        assert_same_bits(given[name], want)
    assert_failed("aclnnModulate", phase_two("aclnnModulate", None, 0, executor, None), INVALID)


def test_what_runs_may_end_its_own_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a finalizer or a signal handler may, on the thread that holds the lock."""
    executor, _ = ready("aclnnModulate")
    aclnn.aclSetAclOpExecutorRepeatable(executor)
    execute = _plan.Plan.execute

    def destroying(*args: Any) -> Any:
        assert aclnn.aclDestroyAclOpExecutor(executor) == SUCCESS
        return execute(*args)

    def work() -> None:
        statuses.extend(phase_two("aclnnModulate", None, 0, executor, None) for _ in range(2))

    monkeypatch.setattr(_plan.Plan, "execute", destroying)
    statuses: list[Any] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert statuses == [SUCCESS, INVALID], "waits for itself" if thread.is_alive() else ""
