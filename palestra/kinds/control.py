"""The kind `control`: deep RL in Gymnasium environments."""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from palestra.cluster.actor import Hub
from palestra.cluster.capacity import Ask
from palestra.cluster.placement import address_of, asks, backend_of, check_room
from palestra.control.algorithms import algorithm_of, check_actions
from palestra.control.asynchronous import Elsewhere, HostedCollector
from palestra.control.envs.goals import check_goals, goals_of
from palestra.control.envs.hosted import HostedEnvs, hosted_copies
from palestra.control.envs.make import MakeVector, evaluation_vector, factory_of, make_single, make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.envs.vector import shares
from palestra.control.evaluation import random_episodes
from palestra.control.nets.heads import ActionHead
from palestra.control.policy import Policy
from palestra.control.seeding import stream
from palestra.control.spaces import ObsShape
from palestra.control.trainer import check_pictures, train
from palestra.control.trial_metrics import summarize
from palestra.errors import UsageError
from palestra.kinds.trial import Launch, check_spec, in_session, run_sessions
from palestra.lm.native import settle_products
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.spec.imports import OBJECT
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import resolved
from palestra.spec.model import plain
from palestra.work.worker import pack

RANDOM_EPISODES = 100


def run(spec: ControlSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial."""
    factory = _factory(spec, launch)
    if factory is not None:  # picklable, which an environment may not be
        launch = replace(launch, objects={**launch.objects, "env": factory})
    # A spec that cannot run is refused here, before it has a folder.
    check_spec(spec)
    if spec.cluster.environments:
        check_room(spec.cluster, _asked(spec))
    probe = make_single(spec.env, factory)
    check_actions(spec, ActionHead.of(probe.action_space))
    if getattr(spec.algorithm, "her", None) is not None:
        check_goals(goals_of(probe), spec.env.id)
    probe.close()
    if spec.every.video is not None:
        check_pictures(spec, factory)

    def summary(trial: Run) -> dict[str, Any]:
        rows = {seed: trial.metrics(seed) for seed in trial.seeds}
        return summarize(rows, _random_return(spec, factory), f"{spec.algorithm.name}/updates")

    # One thread by default: networks this small gain nothing from a second, and lose a lot where its core is busy.
    return run_sessions(
        spec,
        launch,
        partial(in_session, run_session),
        fixed=("kind", "env", "algorithm.name", "algorithm.horizon", "algorithm.staleness", "net"),
        threads=spec.threads or 1,
        total=spec.steps * spec.frames_per_step,
        unit="frames",
        summary=summary,
    )


def run_session(session: Session, spec: ControlSpec, launch: Launch) -> None:
    """Train one seed."""
    settle_products()  # on ARM the products of one library depend on what else the process has computed before
    with session, ExitStack() as stack:
        factory, make, make_evaluated = _factory(spec, launch), make_vector, make_vector
        if getattr(spec.algorithm, "staleness", 0):
            make = _collected(spec, session, launch, stack)
        elif spec.cluster.environments:
            make = make_evaluated = _hosted(spec, session, launch, stack)
        train(spec, session, factory=factory, make=make, make_evaluated=make_evaluated, show=launch.show)


def _asked(spec: ControlSpec) -> list[Ask]:
    return asks(environments=(spec.cluster.environments, False))


def _hub(spec: ControlSpec, launch: Launch, stack: ExitStack) -> Hub:
    """Starts the processes of the spec's cluster; `stack` ends them."""
    cluster = spec.cluster
    run, machine = None if launch.objects else plain(spec), address_of(cluster)
    hub = Hub(backend_of(cluster, spec.name, _asked(spec)), machine=machine, silence=cluster.silence_seconds, spec=run)
    stack.callback(hub.close)
    return hub


def _log(session: Session, number: int) -> Path:
    path = session.path / "logs" / f"environments_{number}.txt"
    path.parent.mkdir(exist_ok=True)
    return path


def _hosted(spec: ControlSpec, session: Session, launch: Launch, stack: ExitStack) -> MakeVector:
    """Makes copies in the processes of the spec's cluster."""
    hub = _hub(spec, launch, stack)
    actors = [
        hub.start(f"environments/{number}", HostedEnvs, log=_log(session, number))
        for number in range(spec.cluster.environments)
    ]
    return lambda env, count, factory: hosted_copies(env, count, factory, actors)


def _collected(spec: ControlSpec, session: Session, launch: Launch, stack: ExitStack) -> MakeVector:
    """Makes environments that the processes of the spec's cluster step by themselves, with copies of the policy."""
    hub, factory = _hub(spec, launch, stack), pack(_factory(spec, launch))
    actors = []
    for number, rows in enumerate(shares(spec.env.num_envs, spec.cluster.environments)):
        given = (spec, factory, rows.stop - rows.start, stream(session.seed, "collector", number))
        actors.append(hub.start(f"environments/{number}", _collector, *given, log=_log(session, number)))
    return lambda env, count, factory: Elsewhere(spec, actors, factory)


def _collector(spec: ControlSpec, factory: bytes, copies: int, seed: int) -> HostedCollector:
    """In another process: its collector."""
    settle_products()
    return HostedCollector(spec, algorithm_of(spec).actor, factory, copies, seed)


def load(run: Run, which: str = "best") -> Policy:
    """The policy of a checkpoint of a run, ready to act."""
    spec = resolved(run.spec)
    assert isinstance(spec, ControlSpec)
    state = load_checkpoint(run.checkpoint(which)).state["algorithm"]["policy"]
    shape = ObsShape.of(state["obs_shape"], state.get("parts"))
    policy = Policy(shape, algorithm_of(spec).actor(spec, shape, ActionHead(state["actions"])))
    policy.load_state(state)
    return policy


def _random_return(spec: ControlSpec, factory: Any) -> float:
    with closing(evaluation_vector(spec.env, 20, factory)) as env:
        seed = stream(spec.seed, "random")
        return float(random_episodes(Stepper(env, spec.env.id), RANDOM_EPISODES, seed).returns.mean())


def _factory(spec: ControlSpec, launch: Launch) -> Any:
    env = launch.objects.get("env")
    if env is None and spec.env.id.startswith(OBJECT):
        raise UsageError(
            f"env: this run's environment is the Python object {spec.env.id.removeprefix(OBJECT)}: "
            "resume it from Python, palestra.run(resume=…, env=…), with that object"
        )
    return None if env is None else factory_of(env)
