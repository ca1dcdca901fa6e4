"""Work in two threads: parts, errors, error state, forks; results do not depend on their number."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import cupyops
from cupyops import _modulate_host, _threads
from cupyops._threads import run_in_threads
from oracle_bits import modulate_backward_bits, modulate_bits
from support import (
    assert_same_bits,
    assert_same_gradients,
    forward_part,
    in_threads,
    modulation_problem,
    positional,
)


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def parts_of(count: int, minimum: int) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []
    run_in_threads(lambda start, stop: parts.append((start, stop)), count, minimum=minimum)
    return sorted(parts)


def test_parts_cover_the_range_once_and_keep_the_minimum():
    assert parts_of(10, 5) == [(0, 5), (5, 10)]
    assert parts_of(11, 5) == [(0, 5), (5, 11)]
    assert parts_of(9, 5) == [(0, 9)]
    assert parts_of(100_000, 1) == [(0, 50_000), (50_000, 100_000)]
    assert parts_of(1, 1) == [(0, 1)]


def test_one_processor_means_one_part(monkeypatch):
    for count in (1, None):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert parts_of(10, 1) == [(0, 10)]


def names_at_once() -> set[str]:
    """The threads of two parts that wait for each other."""
    both = threading.Barrier(2, timeout=20)
    names = set()

    def work(start, stop):
        both.wait()
        names.add(threading.current_thread().name)

    run_in_threads(work, 2, minimum=1)
    return names


def test_parts_run_at_once_in_two_threads():
    assert len(names_at_once()) == 2


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
def test_an_exception_reaches_the_caller_after_all_parts_have_ended(failing):
    ended = []

    def work(start, stop):
        try:
            if start in failing:
                raise KeyError(start)
            threading.Event().wait(0.05)
        finally:
            ended.append(start)

    with pytest.raises(KeyError):
        run_in_threads(work, 2, minimum=1)
    assert sorted(ended) == [0, 1]
    assert parts_of(2, 1) == [(0, 1), (1, 2)], "the threads are of use no more"


@pytest.mark.parametrize("count", [1, 2])
def test_every_part_ignores_floating_point_errors_and_leaves_the_callers_state(count):
    states = []
    with np.errstate(all="raise"):
        size = np.getbufsize()
        run_in_threads(lambda a, b: states.append(np.geterr()), count, minimum=1)
        assert set(np.geterr().values()) == {"raise"}
        assert np.getbufsize() == size
    assert [set(state.values()) for state in states] == [{"ignore"}] * count


def test_no_thread_to_be_had_means_one_part(monkeypatch):
    class Refusing:
        def submit(self, *_):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(_threads, "_pool", Refusing)
    assert parts_of(10, 1) == [(0, 10)]


def test_callers_in_many_threads_each_get_their_parts():
    got = in_threads(8, lambda i: parts_of(100 + i, 1))
    for i, parts in enumerate(got):
        middle = (100 + i) // 2
        assert parts == [(0, middle), (middle, 100 + i)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")  # where a peer of the benchmark is
def test_a_forked_process_starts_threads_of_its_own():
    assert len(names_at_once()) == 2  # the threads exist
    child = os.fork()
    if child == 0:
        done = False
        try:
            done = len(names_at_once()) == 2
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("layout", ["B,D", "D", "1,L,D", "B,L,D"])
@pytest.mark.parametrize("shape", [(2, 70, 9), (1, 131, 33), (3, 65, 20), (33, 3, 7), (1, 700, 1)])
def test_bits_do_not_depend_on_the_number_of_threads(monkeypatch, dtype, shape, layout):
    monkeypatch.setattr(_modulate_host, "FEW_ELEMENTS", 0)
    monkeypatch.setattr(_modulate_host, "PART_ELEMENTS", 1)
    rng = np.random.default_rng(3)
    problem = modulation_problem(rng, shape, dtype, layout, "B,D")
    x, arguments = positional(forward_part(problem))
    assert_same_bits(cupyops.modulate(x, **arguments), modulate_bits(x, **arguments))
    x, arguments = positional(problem)
    got = cupyops.modulate_backward(x, **arguments)
    assert_same_gradients(got, modulate_backward_bits(x, **arguments))


def test_the_buffer_size_of_the_caller_stays(monkeypatch):
    monkeypatch.setattr(_modulate_host, "FEW_ELEMENTS", 0)
    x, before = np.ones((2, 3, 4), np.float32), np.getbufsize()
    cupyops.modulate(x, scale=x)
    cupyops.modulate_backward(x, grad_output=x, scale=x[0, 0])
    assert np.getbufsize() == before
