"""The process pool, for real: kills, hangs, crashes, orphans, nesting."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest
from test_work_tasks import (
    add,
    die_leaving_child_with_the_socket,
    fail,
    fail_awkwardly,
    fail_usage,
    hang_with_child,
    ignore_sigterm,
    maybe_crash,
    nested,
    pids_from,
    save_on_sigterm,
    stuck_in_regex,
    stuck_with_child,
    talk,
)

from palestra.errors import PalestraError, UsageError
from palestra.work.pool import Pool, PoolTask, TaskFailed, TaskTimeout, WorkerDied, as_completed

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux signals and /proc")


@pytest.fixture(autouse=True)
def started_anew(monkeypatch):
    """Workers are processes as users have them, and not forked from a zygote."""
    monkeypatch.setattr("palestra.work.process.subprocess", subprocess)


def gone(pid: int, within: float = 5.0) -> bool:
    """Whether the process ends in time; a zombie has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


# ---- results and failures


def test_submit_function_or_name_with_arguments_returns_value(pool):
    assert pool.submit(add, 1, b=2).result(20) == 3
    assert pool.submit("operator:mul", 6, 7).result(20) == 42


def test_submit_lambda_and_local_function_travel_by_value(pool):
    pytest.importorskip("cloudpickle")
    offset = 5

    def local(x: int) -> int:
        return x + offset

    assert pool.submit(lambda x: local(x) * 2, 1).result(20) == 12


def test_submit_what_cannot_travel_raises_at_once_naming_it(pool):
    with pytest.raises(PalestraError, match=r"Cannot send .*lock"):
        pool.submit(add, threading.Lock())


def test_result_large_payload_goes_both_ways(pool):
    data = os.urandom(5_000_000)
    assert pool.submit("builtins:bytes", data).result(20) == data


def test_result_that_cannot_travel_is_a_failure_and_the_worker_goes_on(pool):
    with pytest.raises(TaskFailed, match="Cannot send"):
        pool.submit("threading:Lock").result(20)
    assert pool.submit(add, 1).result(20) == 1


def test_failure_carries_the_workers_traceback_and_the_exception(pool):
    task = pool.submit(fail, "reward is NaN")
    with pytest.raises(TaskFailed) as caught:
        task.result(20)
    error = caught.value
    assert (error.type_name, error.message, error.exit_code) == ("ValueError", "reward is NaN", 1)
    assert "raise ValueError(message)" in str(error)
    assert 'File "' + fail.__code__.co_filename in error.traceback
    assert isinstance(error.__cause__, ValueError)
    assert str(error.__cause__) == "reward is NaN"


def test_failure_of_palestra_keeps_its_exit_code(pool):
    with pytest.raises(TaskFailed) as caught:
        pool.submit(fail_usage).result(20)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value.__cause__, UsageError)


def test_failure_exception_that_does_not_unpickle_comes_in_words(pool):
    with pytest.raises(TaskFailed) as caught:
        pool.submit(fail_awkwardly).result(20)
    assert str(caught.value.__cause__) == "Awkward: 1 and 2"


def test_failure_sys_exit_in_a_task_does_not_end_the_worker(pool):
    with pytest.raises(TaskFailed, match="SystemExit: 3"):
        pool.submit("sys:exit", 3).result(20)


def test_failure_unknown_module_is_named(pool):
    with pytest.raises(TaskFailed, match="No module named 'no_such_module'"):
        pool.submit("no_such_module:run").result(20)


def test_as_completed_yields_in_order_of_finish(pool):
    slow, quick = pool.submit("time:sleep", 0.5), pool.submit("time:sleep", 0.0)
    assert list(as_completed([slow, quick], timeout=20)) == [quick, slow]


def test_task_awaited_by_asyncio(pool):
    async def wait() -> int:
        return await asyncio.wrap_future(pool.submit(add, 20, b=22))

    assert asyncio.run(wait()) == 42


def test_environment_threads_are_capped_and_variables_set():
    with Pool(1, threads=3, env={"FLAVOUR": "plain"}) as pool:
        names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "FLAVOUR"]
        tasks = [pool.submit("os:getenv", name) for name in names]
        assert [task.result(20) for task in tasks] == ["3", "3", "3", "plain"]


@pytest.mark.slow
def test_environment_torch_in_a_worker_uses_the_cap():
    pytest.importorskip("torch")
    with Pool(1, threads=1) as pool:
        assert pool.submit("torch:get_num_threads").result(60) == 1


def test_log_takes_everything_the_task_prints_and_nothing_else(tmp_path, pool, capfd):
    pool.submit(talk, log=tmp_path / "log.txt").result(20)
    pool.submit(talk, log=tmp_path / "log.txt").result(20)
    said = (tmp_path / "log.txt").read_text()
    assert sorted(said.split("\n")) == sorted(["from python", "from C", "from a child"] * 2 + [""])
    assert capfd.readouterr().out == ""


def test_log_that_cannot_be_opened_fails_the_task(tmp_path, pool):
    with pytest.raises(TaskFailed, match="FileNotFoundError"):
        pool.submit(add, 1, log=tmp_path / "no" / "folder").result(20)


# ---- kills


def test_timeout_kills_worker_and_its_child_and_others_are_unaffected(tmp_path):
    with Pool(2) as pool:
        other = pool.submit("time:sleep", 1.5)
        task = pool.submit(hang_with_child, tmp_path / "pids", timeout=0.5)
        with pytest.raises(TaskTimeout, match=r"hang_with_child was killed after 0\.5 s"):
            task.result(20)
        assert all(gone(pid) for pid in pids_from(tmp_path / "pids", 2))
        assert [pool.submit(add, i).result(20) for i in range(4)] == [0, 1, 2, 3]
        assert other.result(20) is None


def test_timeout_many_hanging_tasks_do_not_starve_the_pool():
    with Pool(2) as pool:
        hanging = [pool.submit("time:sleep", 1000, timeout=0.2) for _ in range(6)]
        after = pool.submit(add, 1)
        assert after.result(30) == 1
        for task in hanging:
            with pytest.raises(TaskTimeout):
                task.result(20)


def test_timeout_task_stuck_in_c_is_killed():
    with Pool(1) as pool:
        with pytest.raises(TaskTimeout):
            pool.submit(stuck_in_regex, timeout=0.5).result(20)
        assert pool.submit(add, 1).result(20) == 1


def test_timeout_does_not_count_importing_the_task(tmp_path, monkeypatch):
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(0.6)\ndef run(): return 'done'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Pool(1) as pool:
        assert pool.submit("slow_import:run", timeout=0.3).result(20) == "done"


@pytest.mark.parametrize(
    ("function", "args", "code", "words"),
    [
        ("os:_exit", (3,), 3, "exited with code 3"),
        ("os:abort", (), -signal.SIGABRT, "killed by SIGABRT"),
        ("ctypes:string_at", (0,), -signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_death_of_a_worker_is_reported_with_code_and_replaced(function, args, code, words):
    with Pool(1) as pool:
        with pytest.raises(WorkerDied, match=words) as caught:
            pool.submit(function, *args).result(20)
        assert caught.value.returncode == code
        assert pool.submit(add, 1).result(20) == 1


def test_death_while_idle_is_not_noticed_by_the_next_task():
    with Pool(1) as pool:
        for _ in range(10):  # at once: the kernel may not have told us of the death when the task is sent
            pid = pool.submit("os:getpid").result(20)
            os.kill(pid, signal.SIGKILL)
            assert pool.submit("os:getpid").result(20) != pid


@LINUX
def test_death_seen_although_a_forked_child_holds_the_socket(tmp_path):
    with Pool(1) as pool:
        with pytest.raises(WorkerDied, match="exited with code 7"):
            pool.submit(die_leaving_child_with_the_socket, tmp_path / "pids").result(20)
        assert gone(*pids_from(tmp_path / "pids", 1))


def test_death_of_five_percent_of_200_tasks_harms_no_other():
    with Pool(2) as pool:
        tasks = [pool.submit(maybe_crash, i) for i in range(200)]
        outcome = {}
        for i, task in enumerate(tasks):
            try:
                outcome[i] = task.result(60)
            except WorkerDied:
                outcome[i] = "died"
    assert outcome == {i: "died" if i % 20 == 7 else i * i for i in range(200)}


@LINUX
def test_heartbeat_stopped_worker_is_killed(tmp_path):
    with Pool(1, heartbeat_timeout=3.5) as pool:
        task = pool.submit(hang_with_child, tmp_path / "pids")
        worker, child = pids_from(tmp_path / "pids", 2)
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"no sign of life for 3\.5 s"):
            task.result(20)
        assert gone(worker)
        assert gone(child)
        assert pool.submit(add, 1).result(20) == 1


@LINUX
def test_heartbeat_worker_stuck_with_the_interpreter_lock_is_killed(tmp_path):
    with Pool(1, heartbeat_timeout=1.5) as pool:
        with pytest.raises(WorkerDied, match="no sign of life"):
            pool.submit(stuck_with_child, tmp_path / "pids").result(20)
        assert all(gone(pid) for pid in pids_from(tmp_path / "pids", 2))


def test_heartbeat_busy_task_longer_than_the_limit_lives():
    with Pool(1, heartbeat_timeout=2.5) as pool:
        assert pool.submit("time:sleep", 3.5).result(20) is None


def test_cancel_waiting_running_and_done_tasks(tmp_path):
    with Pool(1) as pool:
        running = pool.submit(hang_with_child, tmp_path / "pids")
        waiting = pool.submit(add, 1)
        pids = pids_from(tmp_path / "pids", 2)
        assert waiting.cancel()
        assert list(as_completed([waiting], timeout=1)) == [waiting]
        assert running.cancel()
        for task in (waiting, running):
            with pytest.raises(CancelledError):
                task.result(20)
        assert all(gone(pid) for pid in pids)
        done = pool.submit(add, 2)
        assert done.result(20) == 2
        assert not done.cancel()


def test_stop_lets_running_tasks_save_and_cancels_waiting_ones(tmp_path):
    with Pool(1) as pool:
        running = pool.submit(save_on_sigterm, tmp_path / "pid")
        waiting = pool.submit(add, 1)
        pids_from(tmp_path / "pid", 1)
        pool.stop(grace=20)
        assert (tmp_path / "pid.saved").read_text() == "saved"
        with pytest.raises(TaskFailed) as caught:
            running.result(0)
        assert caught.value.exit_code == 130
        with pytest.raises(CancelledError):
            waiting.result(0)
        with pytest.raises(RuntimeError, match="closed"):
            pool.submit(add, 1)


def test_stop_kills_what_ignores_it_after_the_grace(tmp_path):
    with Pool(2) as pool:
        tasks = [pool.submit(ignore_sigterm, tmp_path / "pids") for _ in range(2)]
        pids = pids_from(tmp_path / "pids", 2)
        pool.stop(grace=0.5)
        assert all(gone(pid) for pid in pids)
        assert all(isinstance(task.exception(0), CancelledError) for task in tasks)


@pytest.mark.parametrize("repeat", range(3))
def test_stop_at_once_while_tasks_are_being_taken_leaves_none_unfinished(repeat):
    pool = Pool(2)
    tasks = [pool.submit("time:sleep", 1000) for _ in range(4)]
    time.sleep(0.05 * repeat)
    pool.stop(grace=0)
    assert all(task.done() for task in tasks)


def test_leaving_waits_for_tasks_and_by_exception_stops_them(tmp_path):
    with Pool(2) as pool:
        task = pool.submit("time:sleep", 0.3)
    assert task.result(0) is None
    with contextlib.suppress(KeyError), Pool(1) as pool:
        task = pool.submit(hang_with_child, tmp_path / "pids")
        pids = pids_from(tmp_path / "pids", 2)
        raise KeyError
    assert all(gone(pid) for pid in pids)
    with pytest.raises(WorkerDied, match="killed by SIGTERM"):
        task.result(0)


# ---- no orphans, no guards


def kill_parent_of(code: str, pids: Path, count: int) -> list[int]:
    """Run the code in a process, SIGKILL that once the tasks have written their numbers, and return those."""
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=Path(__file__).parent)
    found = pids_from(pids, count)
    assert all(psutil.pid_exists(pid) for pid in found)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    return found


@LINUX
@pytest.mark.parametrize("task", ["hang_with_child", "stuck_with_child"])
def test_orphans_parent_killed_ends_workers_and_their_children(tmp_path, task):
    code = f"""
    from pathlib import Path
    from palestra.work.pool import Pool
    pool = Pool(2)
    for _ in range(2):
        task = pool.submit("test_work_tasks:{task}", Path({str(tmp_path / "pids")!r}))
    task.result()
    """
    for pid in kill_parent_of(code, tmp_path / "pids", 4):
        assert gone(pid), f"{pid} outlived its parent"


@LINUX
def test_orphans_forked_sibling_holding_every_pipe_changes_nothing(tmp_path):
    code = f"""
    import os, time
    from pathlib import Path
    from palestra.work.pool import Pool
    pool = Pool(1)
    pool.submit("os:getpid").result()
    if (sibling := os.fork()) == 0:
        time.sleep(100)
        os._exit(0)
    Path({str(tmp_path / "sibling")!r}).write_text(str(sibling))
    pool.submit("test_work_tasks:hang_with_child", Path({str(tmp_path / "pids")!r})).result()
    """
    try:
        for pid in kill_parent_of(code, tmp_path / "pids", 2):
            assert gone(pid), f"{pid} outlived its parent"
    finally:
        os.kill(int((tmp_path / "sibling").read_text()), signal.SIGKILL)


@LINUX
def test_orphans_guard_killed_too_worker_stuck_in_c_still_ends(tmp_path):
    code = f"""
    from pathlib import Path
    from palestra.work.pool import Pool
    pool = Pool(1)
    task = pool.submit("test_work_tasks:stuck_with_child", Path({str(tmp_path / "pids")!r}))
    Path({str(tmp_path / "guard")!r}).write_text(str(pool._groups._guard.pid))
    task.result()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=Path(__file__).parent)
    worker, child = pids_from(tmp_path / "pids", 2)
    try:
        os.kill(int((tmp_path / "guard").read_text()), signal.SIGKILL)
        os.kill(parent.pid, signal.SIGKILL)
        assert gone(worker)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.wait()


def test_interrupt_of_the_parent_lets_tasks_save_and_leaves_nothing(tmp_path):
    code = f"""
    import signal
    from pathlib import Path
    from palestra.work.pool import Pool
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started ignoring it
    with Pool(1) as pool:
        pool.submit("test_work_tasks:save_on_sigterm", Path({str(tmp_path / "pid")!r})).result()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True
    )
    (worker,) = pids_from(tmp_path / "pid", 1)
    os.kill(parent.pid, signal.SIGINT)
    _, said = parent.communicate(timeout=20)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert (tmp_path / "pid.saved").read_text() == "saved"
    assert gone(worker)


@LINUX
def test_orphans_nested_pools_end_with_the_outermost_process(tmp_path):
    code = f"""
    from pathlib import Path
    from palestra.work.pool import Pool
    Pool(1).submit("test_work_tasks:nested_hang", Path({str(tmp_path / "pids")!r})).result()
    """
    for pid in kill_parent_of(code, tmp_path / "pids", 3):
        assert gone(pid), f"{pid} outlived the outermost process"


@LINUX
def test_orphans_interpreter_exit_without_closing_leaves_nothing(tmp_path):
    code = f"""
    import os
    from pathlib import Path
    from palestra.work.pool import Pool
    pool = Pool(1)
    pool.submit("test_work_tasks:hang_with_child", Path({str(tmp_path / "pids")!r}))
    import test_work_tasks
    test_work_tasks.pids_from(Path({str(tmp_path / "pids")!r}), 2)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, cwd=Path(__file__).parent)
    assert all(gone(pid) for pid in pids_from(tmp_path / "pids", 2))


def test_close_leaves_no_process_and_no_descriptor():
    me = psutil.Process()
    before, children = me.num_fds(), set(me.children(recursive=True))
    for _ in range(3):
        with Pool(2) as pool:
            pool.submit(add, 1).result(20)
    assert me.num_fds() == before
    assert set(me.children(recursive=True)) == children


def test_nested_pool_in_a_task_works(pool):
    assert pool.submit(nested, 5).result(30) == [0, 2, 4, 6, 8]


def test_script_without_main_guard_runs_once_with_its_own_functions(tmp_path):
    pytest.importorskip("cloudpickle")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from palestra.work.pool import Pool

        @dataclass
        class Point:
            x: int

        def double(point):
            return Point(2 * point.x)

        print("started")
        with Pool(2) as pool:
            results = [task.result() for task in [pool.submit(double, Point(i)) for i in range(3)]]
        assert all(type(result) is Point for result in results)
        print(results)
        """)
    )
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "started\n[Point(x=0), Point(x=2), Point(x=4)]\n"


def test_worker_imports_neither_torch_nor_the_files_of_the_current_folder(tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    code = """
    import sys
    sys.path = [p for p in sys.path if p]
    from palestra.work.pool import Pool
    with Pool(1) as pool:
        print(pool.submit("builtins:eval", "'torch' in __import__('sys').modules").result())
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "False\n"


def test_task_round_trip_and_start_up_are_measured(record_property):
    start = time.perf_counter()
    with Pool(1) as pool:
        pool.submit("os:getpid").result(20)
        record_property("start_up_s", time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(200):
            pool.submit("os:getpid").result(20)
        record_property("round_trip_ms", (time.perf_counter() - start) * 5)
        assert isinstance(pool.submit("os:getpid"), PoolTask)
