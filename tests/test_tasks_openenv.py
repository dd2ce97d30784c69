"""The client of OpenEnv's servers, over a server with their wire format in a thread, and over the real package."""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from openenv_server import OPEN, application
from test_rollout_environment import KNOWS, roll, script

from palestra.errors import UsageError
from palestra.tasks.environments import servers
from palestra.tasks.environments.openenv import Client
from palestra.tasks.task import Problem, make_task

PROBLEM = Problem("echo/train/0", "?")


@pytest.fixture(scope="module")
def address():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(application(), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_client_resets_steps_reads_the_state_and_closes(address: str) -> None:
    client = Client(address, start=5)
    Client.warm_up()
    assert client.reset(7, PROBLEM).observation == "left: 5"
    turn = client.step("2")
    assert (turn.observation, turn.rewards, turn.done) == ("left: 3", {0: 0.0}, False)
    assert client.step('```json\n{"take": 1}\n```').observation == "left: 2"
    assert client.step("two").observation == "Invalid action: take: Input should be a valid integer"
    assert client.state() == {"step_count": 2}
    last = client.step("2")
    assert (last.rewards, last.done) == ({0: 1.0}, True)
    client.close()


def test_workflow_plays_sessions_and_leaves_none_open(address: str) -> None:
    problem = make_task(f"openenv:{address}", {"config": {"start": 4}}).problems("train")[0]
    games = roll(problem, script("1", "3"), samples=3)
    assert [one.reward for one in games] == [1.0, 1.0, 1.0]
    assert "left: 3\n" in KNOWS.decode(games[0].tokens)
    broken, *_ = roll(problem, script("1", "13"), samples=2)
    assert (broken.verdict.status, "EXECUTION_ERROR: bad luck" in broken.verdict.note) == ("error", True)
    for _ in range(100):
        if not OPEN:
            break
        time.sleep(0.05)
    assert not OPEN


def test_no_server_is_an_error_and_not_a_score() -> None:
    problem = make_task("openenv:http://127.0.0.1:9").problems("train")[0]
    (one,) = roll(problem, script("1"), samples=1)
    assert (one.verdict.status, "there is no OpenEnv server at" in one.verdict.note) == ("error", True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package, as their template has it, whose server allows one session."""
    (tmp_path / "countdown" / "server").mkdir(parents=True)
    code = "from openenv_server import application\napp = application(sessions=1)\n"
    (tmp_path / "countdown" / "server" / "app.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parent}")
    return tmp_path / "countdown"


@pytest.mark.parametrize("name", ["package", "folder"])
def test_package_is_served_played_and_its_server_ended(package: Path, name: str) -> None:
    where = "countdown" if name == "package" else str(package)
    problem = make_task(f"openenv:{where}", {"config": {"start": 4, "servers": 2}}).problems("train")[0]
    games = roll(problem, script("1", "3"), samples=5)  # of which three wait for one of two sessions
    assert [one.reward for one in games] == [1.0] * 5
    first, _ = (one.child for one in servers._servers.values() if one.package == where)
    os.kill(first.pid, signal.SIGKILL)
    while first.exit_code() is None:
        time.sleep(0.01)
    assert [one.reward for one in roll(problem, script("1", "3"), samples=3)] == [1.0] * 3
    servers._stack.close()
    assert not [one for one in servers._servers.values() if one.child.exit_code() is None]


def test_package_that_is_not_there_is_the_users_error() -> None:
    problem = make_task("openenv:no_such_env").problems("train")[0]
    with pytest.raises(UsageError, match=r"openenv:no_such_env: its server ended: .*No module named 'no_such_env'"):
        roll(problem, script("1"), samples=1)
    with pytest.raises(UsageError, match="expected the URL of a server, an installed package or a folder"):
        Client("no such env").reset(0, PROBLEM)


REAL = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="one", step_count=0)
    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id="one", step_count=0)
        return Heard(text=f"seed {seed}", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        return Heard(text=action.message.upper(), done=self._state.step_count == 2, reward=float(len(action.message)))
    @property
    def state(self):
        return self._state

uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=4), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.slow
@pytest.mark.skipif("OPENENV_PYTHON" not in os.environ, reason="OPENENV_PYTHON names no interpreter with openenv")
def test_server_of_the_real_package_is_played(tmp_path: Path) -> None:
    """Their package has many dependencies: it runs in an environment of its own, whose Python OPENENV_PYTHON names."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = subprocess.Popen([os.environ["OPENENV_PYTHON"], "-c", REAL, str(port)])
    try:
        for _ in range(1800):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert program.poll() is None
            time.sleep(0.1)
        problem = make_task(f"openenv:http://127.0.0.1:{port}").problems("train")[0]
        one, other = roll(problem, script("hi", "you"))
        assert one.turn_rewards == other.turn_rewards == (2.0, 3.0)
        assert "HI\nyou\n" in KNOWS.decode(one.tokens)
        client = Client(f"ws://127.0.0.1:{port}")
        client.reset(3, PROBLEM)
        client.step('{"message": "a"}')
        assert client.state()["step_count"] == 1
        assert client.step('{"other": 1}').observation.startswith("Invalid action: message: Field required")
        client.close()
    finally:
        program.kill()
        program.wait()


@pytest.mark.slow
@pytest.mark.skipif("OPENENV_PYTHON" not in os.environ, reason="OPENENV_PYTHON names no interpreter with openenv")
def test_environment_of_their_template_is_served_and_played(tmp_path: Path) -> None:
    """`openenv init` writes an echo that rewards a tenth for each sign; its server allows one session."""
    python = Path(os.environ["OPENENV_PYTHON"])
    subprocess.run([python.parent / "openenv", "init", "echo_env"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    args = {"config": {"python": str(python)}}
    problem = make_task(f"openenv:{tmp_path / 'echo_env'}", args).problems("train")[0]
    games = roll(problem, script("hi"), samples=3, turns=2)
    assert [one.turn_rewards for one in games] == [(0.2, 0.2)] * 3
    assert "echoed_message: hi\nmessage_length: 2\n" in KNOWS.decode(games[0].tokens)
