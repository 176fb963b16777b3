"""Several processes at once: tasks in turn, results in order, and none outlives an error or an interrupt."""

import os
import signal
import sys
import threading

import pytest

from parity_tests.evidence.workers import Workers
from parity_tests.specimens.processes import is_there

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_tasks_begin_in_turn_and_results_keep_their_order():
    workers, second_is_done = Workers(2), threading.Event()

    def task(number):
        if number == 0:
            second_is_done.wait(60)
        else:
            second_is_done.set()
        return -number

    assert workers.each(task, range(6)) == [0, -1, -2, -3, -4, -5] and not workers.stopped.is_set()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_running_tasks_end_when_one_raises(error):
    workers, running, pids = Workers(2), threading.Event(), []

    def task(is_long):
        if is_long:
            with workers.process(SLEEPS) as process:
                pids.append(process.pid)
                running.set()
                return process.wait()
        running.wait(60)
        raise error

    with pytest.raises(error):
        workers.each(task, [True, False, True])
    assert workers.stopped.is_set() and pids and not any(map(is_there, pids))


def test_a_process_ends_with_its_block():
    with pytest.raises(ZeroDivisionError), Workers(1).process(SLEEPS) as process:
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGTERM and not is_there(process.pid)


def test_tasks_of_a_task_run_in_its_thread():
    workers = Workers(2)
    threads = workers.each(lambda _: workers.each(lambda _: threading.get_ident(), range(5)), range(2))
    assert [len(set(each)) for each in threads] == [1, 1]


def test_an_interrupt_ends_running_tasks():
    workers, pids = Workers(2), []

    def task(_):
        with workers.process(SLEEPS) as process:
            pids.append(process.pid)
            process.wait()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("parity_tests.evidence.workers.MEANWHILE_S", 0.5)
        workers.each(task, range(2), interrupt)
    assert pids and not any(map(is_there, pids))


def test_a_function_is_called_in_a_process_of_its_own():
    workers = Workers(2)
    pids = workers.each(lambda _: workers.call(os.getpid), range(2))
    assert len({*pids, os.getpid()}) == 3 and not any(map(is_there, pids))
    with pytest.raises(ValueError, match="invalid literal"):
        workers.call(int, "x")
