import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zygote

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs import session as session_module
from palestra.runs.lease import LeaseLost, Owner, RunBusy
from palestra.runs.session import Session, read_status, state_of
from palestra.runs.store import read_json, write_json

SPEC = {"kind": "control", "algorithm": {"lr": 0.1, "clip": {"start": 0.2}}, "train": {"frames": 100}}


@pytest.fixture
def fast_heartbeat(monkeypatch):
    monkeypatch.setattr(session_module, "HEARTBEAT_SECONDS", 0.02)


def create(path: Path) -> Session:
    return Session.create(path, spec_yaml="kind: control\n", spec_data=SPEC, manifest={"seed": 3, "diff": "+x\n"})


class Rows:
    """A followed metrics file, buffered as a trainer's would be."""

    def __init__(self, session: Session):
        self.file = (session.path / "metrics.jsonl").open("a")
        session.follow("metrics.jsonl", self.file.flush)

    def write(self, step: int) -> None:
        self.file.write(json.dumps({"step": step}) + "\n")


def wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited 10 s in vain"
        time.sleep(0.005)


def test_create_writes_spec_manifest_and_diff(tmp_path):
    session = create(tmp_path / "s")
    assert (session.path / "spec.yaml").read_text() == "kind: control\n"
    assert (session.path / "git.diff").read_text() == "+x\n"
    assert read_json(session.path / "manifest.json") == {"seed": 3, "id": session.id, "spec": SPEC}
    assert Session.open(session.path).spec_data == SPEC
    assert session.seed == 3
    assert state_of(session.path) == "new"
    with pytest.raises(UsageError, match="already holds a session"):
        create(tmp_path / "s")


def test_open_of_another_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a session's folder"):
        Session.open(tmp_path)


def test_session_that_ends_well_is_done(tmp_path):
    with create(tmp_path / "s") as session:
        assert state_of(session.path) == "running"
        session.progress(step=1, frame=10)
        session.progress(step=2, headline={"return": 5.0})
    status = read_status(session.path)
    assert (status["state"], status["reason"], status["pid"]) == ("done", None, os.getpid())
    assert status["progress"] == {"step": 2, "frame": 10, "headline": {"return": 5.0}}
    assert not (session.path / "lease.json").exists()


def test_session_that_fails_keeps_reason_and_traceback_and_raises(tmp_path, capsys):
    session = create(tmp_path / "s")
    with pytest.raises(ZeroDivisionError), session:
        1 / 0  # noqa: B018
    status = read_status(session.path)
    assert status["state"] == "failed"
    assert status["reason"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in status["traceback"]
    assert "ZeroDivisionError" in (session.path / "log.txt").read_text()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [Interrupted("asked to stop"), KeyboardInterrupt()])
def test_session_that_is_interrupted_says_so(tmp_path, error):
    session = create(tmp_path / "s")
    with pytest.raises(type(error)), session:
        raise error
    assert state_of(session.path) == "interrupted"


def test_heartbeat_writes_progress_while_running(tmp_path, fast_heartbeat):
    with create(tmp_path / "s") as session:
        first = read_status(session.path)["heartbeat"]
        lease = read_json(session.path / "lease.json")["heartbeat"]
        session.progress(step=7)
        wait_for(lambda: read_status(session.path)["progress"] == {"step": 7})
        assert read_status(session.path)["heartbeat"] > first
        wait_for(lambda: read_json(session.path / "lease.json")["heartbeat"] > lease)


def test_log_file_holds_info_lines_only_while_the_session_is_entered(tmp_path):
    logger = logging.getLogger("palestra.control")
    handlers = list(logging.getLogger("palestra").handlers)
    with create(tmp_path / "s") as session:
        logger.info("inside")
        logger.debug("too fine")
    logger.warning("after")
    text = (session.path / "log.txt").read_text()
    assert "inside" in text
    assert "after" not in text
    assert "too fine" not in text
    assert logging.getLogger("palestra").handlers == handlers
    assert logging.getLogger("palestra").level == logging.NOTSET


def test_warning_in_a_plain_script_still_reaches_stderr(tmp_path):
    create(tmp_path / "s")
    script = (
        "import logging, sys; from pathlib import Path; from palestra.runs.session import Session\n"
        "with Session.open(Path(sys.argv[1])):\n"
        "    logging.getLogger('palestra.x').warning('careful'); logging.getLogger('palestra.x').info('detail')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "s"], capture_output=True, text=True, check=True)
    assert done.stderr == "careful\n"


def test_first_sigterm_sets_stop_requested_and_handlers_come_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with create(tmp_path / "s") as session:
        assert not session.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert session.stop_requested
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_second_sigint_raises_at_once(tmp_path):
    session = create(tmp_path / "s")

    def press_twice():
        with session:
            os.kill(os.getpid(), signal.SIGINT)
            assert session.stop_requested
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert state_of(session.path) == "interrupted"


def test_session_in_another_thread_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with create(tmp_path / "s"):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert state_of(tmp_path / "s") == "done"


TRAIN = """
import json, sys, time
from pathlib import Path
import numpy as np
from palestra.errors import Interrupted
from palestra.runs.session import Session
until = int(sys.argv[2])
try:
    with Session.open(Path(sys.argv[1])) as session:
        found = session.restore()
        step, rng = 0, np.random.default_rng(0)
        if found is not None:
            step, rng.bit_generator.state = found.state["step"], found.state["rng"]
        rows = (session.path / "metrics.jsonl").open("a")
        session.follow("metrics.jsonl", rows.flush)
        print("ready", flush=True)
        while step < until:
            step += 1
            rows.write(json.dumps({"step": step, "x": rng.normal()}) + "\\n")
            rows.flush() if step % 3 == 0 else None
            session.progress(step=step)
            if step % 5 == 0 or session.stop_requested:
                state = {"step": step, "rng": rng.bit_generator.state, "w": np.zeros(1000)}
                session.checkpoint(step, state, reasons={"kept"} if step % 100 == 0 else {"time"})
            if session.stop_requested:
                raise Interrupted("asked to stop")
            time.sleep(0.001)
        rows.close()
except Interrupted as error:
    sys.exit(error.exit_code)
"""


def train(path: Path, until: int) -> subprocess.Popen:
    process = zygote.Popen([sys.executable, "-c", TRAIN, path, str(until)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen) -> int:
    process.communicate()
    return process.returncode


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_several_times_the_metrics_equal_an_uninterrupted_run(tmp_path, kills):
    create(tmp_path / "killed")
    moments = np.random.default_rng(1)
    for _ in range(kills):
        process = train(tmp_path / "killed", 10**9)
        time.sleep(moments.uniform(0.0, 0.12))
        process.kill()
        end(process)
        assert state_of(tmp_path / "killed") == "killed"
    with Session.open(tmp_path / "killed") as session:
        until = session.restore().step + 20
    create(tmp_path / "whole")
    for name in ("killed", "whole"):
        assert end(train(tmp_path / name, until)) == 0
        assert state_of(tmp_path / name) == "done"
    whole, killed = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed"))
    assert whole == killed
    assert whole.count(b"\n") == until


def test_second_process_on_one_folder_is_refused_and_sigterm_saves(tmp_path):
    path = create(tmp_path / "s").path
    process = train(path, 10**9)
    with pytest.raises(RunBusy, match=f"process {process.pid}"), Session.open(path):
        pytest.fail("entered a folder that is in use")
    assert state_of(path) == "running"
    wait_for(lambda: any((path / "checkpoints").glob("step_*")))
    process.terminate()
    assert end(process) == 130
    assert state_of(path) == "interrupted"
    rows = (path / "metrics.jsonl").read_text().splitlines()
    with Session.open(path) as session:
        assert session.restore().step == len(rows)


def test_checkpoint_after_the_lease_is_lost_raises_and_leaves_status_alone(tmp_path, fast_heartbeat):
    session = create(tmp_path / "s")

    def lose_and_go_on():
        with session:
            other = replace(Owner.here(), host="elsewhere", machine="elsewhere")
            write_json(session.path / "lease.json", {**vars(other), "token": "t", "heartbeat": time.time()})
            wait_for(lambda: session.stop_requested)
            with pytest.raises(LeaseLost):
                session.progress(step=1)
            session.checkpoint(1, {}, reasons={"kept"})

    with pytest.raises(LeaseLost):
        lose_and_go_on()
    assert not any((session.path / "checkpoints").iterdir())
    assert read_status(session.path)["state"] == "running"
    assert read_json(session.path / "lease.json")["host"] == "elsewhere"


def test_restore_cuts_files_to_the_checkpoint(tmp_path):
    with create(tmp_path / "s") as session:
        assert session.restore() is None
        rows = Rows(session)
        for step in (1, 2, 3):
            rows.write(step)
            if step == 2:
                session.checkpoint(2, {"x": 1}, reasons={"time"}, counters={"frame": 20})
        rows.file.close()
        (session.path / "trace.json").write_text("[\n")  # began after the checkpoint
    with Session.open(session.path) as session:
        found = session.restore()
    assert (found.step, found.state, found.meta.counters) == (2, {"x": 1}, {"frame": 20})
    assert (session.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (session.path / "trace.json").read_text() == ""


def test_restore_without_checkpoint_empties_append_only_files(tmp_path):
    with create(tmp_path / "s") as session:
        (session.path / "metrics.jsonl").write_text('{"step": 1}\n')
        (session.path / "log.txt").write_text("kept")
        assert session.restore() is None
        assert (session.path / "metrics.jsonl").read_text() == ""
        assert (session.path / "log.txt").read_text() == "kept"


def test_restore_with_a_shortened_file_goes_to_the_older_checkpoint(tmp_path, caplog):
    with create(tmp_path / "s") as session:
        rows = Rows(session)
        for step in (1, 2):
            rows.write(step)
            session.checkpoint(step, {}, reasons={"kept"})
        rows.file.close()
    os.truncate(session.path / "metrics.jsonl", 15)
    with Session.open(session.path) as session:
        assert session.restore().step == 1
        assert "step_000000002 does not fit metrics.jsonl, which has 15 bytes instead of 24" in caplog.text
        assert (session.path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_checkpoint_after_a_damaged_later_one_stays_the_newest(tmp_path):
    with create(tmp_path / "s") as session:
        session.checkpoint(10, {"n": 10}, reasons={"kept"})
        later = session.checkpoint(20, {"n": 20, "w": np.zeros(9)}, reasons={"time"})
    arrays = later / "state/arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"\x01")  # same size: only the checksum tells
    with Session.open(session.path) as session:
        assert session.restore().step == 10
        session.checkpoint(15, {"n": 15}, reasons={"time"})
    with Session.open(session.path) as session:
        assert session.restore().step == 15


def test_checkpoint_records_known_files_that_are_not_followed(tmp_path):
    with create(tmp_path / "s") as session:
        names = ("trace.json", "trace.generator-0.json")
        for name in names:
            (session.path / name).write_text("[\n")
        session.checkpoint(1, {}, reasons={"kept"})
        (session.path / names[1]).write_text("[\n{}")
        assert session.restore().meta.offsets == dict.fromkeys(names, 2)
        assert [(session.path / name).read_text() for name in names] == ["[\n", "[\n"]
        (session.path / names[1]).unlink()  # a user may remove it
        assert session.restore().step == 1


def test_checkpoint_outside_the_context_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="not held"):
        create(tmp_path / "s").checkpoint(1, {}, reasons=set())


def changed(**algorithm):
    return {**SPEC, "algorithm": {**SPEC["algorithm"], **algorithm}}


def test_check_resume_with_the_same_spec_passes(tmp_path):
    assert create(tmp_path / "s").check_resume(SPEC) == []


def test_check_resume_with_a_changed_spec_is_refused_field_by_field(tmp_path):
    session = create(tmp_path / "s")
    with pytest.raises(UsageError) as caught:
        session.check_resume(changed(lr=0.2, clip={"start": 0.3}), allow=["algorithm.clip"])
    assert "algorithm.lr: 0.1 → 0.2" in str(caught.value)
    assert "--allow algorithm.lr" in str(caught.value)
    assert "clip" not in str(caught.value)
    with pytest.raises(UsageError, match=r"algorithm\.lr"):
        session.check_resume(changed(lr=0.2), allow=["algorithm.l"])  # a part of a name allows nothing


def test_check_resume_with_allowed_changes_gives_them_and_amend_stores_them(tmp_path):
    session = create(tmp_path / "s")
    new = changed(lr=0.2, clip={"start": 0.3})
    assert {change.path for change in session.check_resume(new, allow=["algorithm"])} == {
        "algorithm.lr",
        "algorithm.clip.start",
    }
    session.amend(spec_yaml="kind: control # new\n", spec_data=new, manifest={"seed": 3})
    again = Session.open(session.path)
    assert again.check_resume(new) == []
    assert again.manifest["before"]["spec"] == SPEC
    assert (session.path / "spec.yaml").read_text() == "kind: control # new\n"


def test_create_under_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PalestraError, match="cannot write the run folder"):
        create(tmp_path / "file" / "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="drops from root to an ordinary user")
def test_enter_of_an_unwritable_folder_is_a_clear_error(tmp_path):
    path = create(tmp_path / "s").path
    script = (
        "import os, sys; from pathlib import Path; from palestra.runs.session import Session\n"
        "session = Session.open(Path(sys.argv[1])); os.chdir(sys.argv[1])\n"
        "session = Session(Path('.')); os.seteuid(65534)\n"
        "try:\n    session.__enter__()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("PalestraError cannot write the run folder .: Permission denied")


def test_state_of_a_run_whose_owner_elsewhere_fell_silent_is_killed(tmp_path):
    with create(tmp_path / "s") as session:
        pass
    other = {**vars(Owner.here()), "machine": "elsewhere", "state": "running", "heartbeat": time.time()}
    write_json(session.path / "status.json", other)
    assert state_of(session.path) == "running"
    write_json(session.path / "status.json", {**other, "heartbeat": time.time() - 60})
    assert state_of(session.path) == "killed"
