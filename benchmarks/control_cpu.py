"""Our algorithms beside Stable-Baselines3's, at the same hyper-parameters, in the same environments.

    make bench                                            # PPO on CartPole, four seeds
    python benchmarks/control_cpu.py --algorithm dqn --seeds 2
    python benchmarks/control_cpu.py --algorithm sac --seeds 2 --precision bf16
    python benchmarks/control_cpu.py --algorithm td3 --seeds 10 --parallel 2

Both train the same seeds, from 100 on, each in a process of its own on one torch thread: one after the other, or
`--parallel 2` on two cores, where every run has the same neighbors. Frames/s are those of the training loop
from the end of its first step (off-policy: from `warm` frames, when all is compiled) to its end, with logging and
checkpoints, without evaluation; what starting and compiling took is printed apart.
The score of both is that of SLM-Lab's tables: the mean, over the log points of the last quarter of the run or the last
100 of them, whichever are more, of the mean return of the last 100 episodes of the exploring policy.
One JSON line for each seed, and one for all. Before that, for PPO, how long the fast spec trains, eagerly, to solve
CartPole.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples" / "control"
FAST = EXAMPLES / "ppo_cartpole_fast.yaml"
WINDOW = 100
TICK = 256  # frames between two log points of Stable-Baselines3, at least

NET = {"hidden": [256, 256], "activation": "relu", "orthogonal": False}  # Stable-Baselines3's, off-policy

ticks: list[tuple[float, float, int, float]] = []  # (seconds, CPU seconds, frame, mean return of the last 100 episodes)


def note(frame: int, score: float) -> None:
    ticks.append((time.perf_counter(), time.process_time(), frame, score))


def tick(moment: Any) -> None:
    """The hook that notes when each of our steps ended."""
    if "return" in moment.metrics:
        note(moment.seen, moment.metrics["return"])


# ---- the cases: a spec of ours, and what makes Stable-Baselines3's model of it


def ppo(spec: Any, env: Any, seed: int) -> Any:
    from stable_baselines3 import PPO

    algorithm = spec.algorithm
    return PPO(
        "MlpPolicy",
        env,
        learning_rate=algorithm.lr.start,
        n_steps=algorithm.horizon,
        batch_size=algorithm.minibatch,
        n_epochs=algorithm.epochs,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.lam,
        clip_range=algorithm.clip.start,
        ent_coef=algorithm.entropy.start,
        vf_coef=algorithm.value_coef,
        max_grad_norm=algorithm.max_grad_norm,
        seed=seed,
        device="cpu",
    )


def off_policy(spec: Any, seed: int) -> dict[str, Any]:
    """What its off-policy algorithms take of our spec."""
    algorithm = spec.algorithm
    return {
        "learning_rate": algorithm.lr.start,
        "buffer_size": algorithm.buffer,
        "learning_starts": algorithm.start,
        "batch_size": algorithm.batch,
        "gamma": algorithm.gamma,
        "train_freq": algorithm.update_every,
        "gradient_steps": algorithm.updates_at_once(spec.env.num_envs),
        "policy_kwargs": {"net_arch": list(spec.net.hidden)},
        "seed": seed,
        "device": "cpu",
    }


def dqn(spec: Any, env: Any, seed: int) -> Any:
    from stable_baselines3 import DQN

    algorithm = spec.algorithm
    return DQN(
        "MlpPolicy",
        env,
        # Counted in frames there, in gradient steps here.
        target_update_interval=round(algorithm.target_every / algorithm.replay_ratio),
        max_grad_norm=algorithm.max_grad_norm,
        exploration_initial_eps=algorithm.epsilon.start,
        exploration_final_eps=algorithm.epsilon.end,
        exploration_fraction=algorithm.epsilon.finish,
        **off_policy(spec, seed),
    )


def dqn_spec(**changed: Any) -> dict[str, Any]:
    """DQN on CartPole as RL Baselines3 Zoo tuned it: plain targets, one environment."""
    algorithm = {
        "name": "dqn",
        "lr": 2.3e-3,
        "batch": 64,
        "buffer": 100_000,
        "start": 1000,
        "gamma": 0.99,
        "horizon": 256,
        "update_every": 256,
        "replay_ratio": 0.5,
        "target_every": 128,
        "double": False,
        "epsilon": {"shape": "linear", "start": 1.0, "end": 0.04, "finish": 0.16},
    }
    return {
        "kind": "control",
        "name": "dqn_bench",
        "env": {"id": "CartPole-v1", "num_envs": 1},
        "algorithm": algorithm | changed,
        "net": NET,
        "train": {"frames": 50_000},
    }


def sac(spec: Any, env: Any, seed: int) -> Any:
    from stable_baselines3 import SAC

    return SAC("MlpPolicy", env, tau=spec.algorithm.tau, **off_policy(spec, seed))


def td3(spec: Any, env: Any, seed: int) -> Any:
    import numpy as np
    from stable_baselines3 import TD3
    from stable_baselines3.common.noise import NormalActionNoise

    algorithm = spec.algorithm
    dimensions = env.action_space.shape
    return TD3(
        "MlpPolicy",
        env,
        tau=algorithm.tau,
        policy_delay=algorithm.policy_delay,
        action_noise=NormalActionNoise(np.zeros(dimensions), np.full(dimensions, algorithm.noise.start)),
        target_policy_noise=algorithm.target_noise,
        target_noise_clip=algorithm.noise_clip,
        **off_policy(spec, seed),
    )


def pendulum_spec(name: str, **algorithm: Any) -> dict[str, Any]:
    """Pendulum with Stable-Baselines3's defaults and the learning rate of RL Baselines3 Zoo: an update a frame."""
    shared = {"lr": 1e-3, "batch": 256, "buffer": 200_000, "gamma": 0.99, "tau": 0.005, "horizon": 256}
    return {
        "kind": "control",
        "name": f"{name}_bench",
        "env": {"id": "Pendulum-v1", "num_envs": 1},
        "algorithm": {"name": name} | shared | algorithm,
        "net": NET,
        "train": {"frames": 12_000},
    }


@dataclass(frozen=True)
class Case:
    spec: Path | dict[str, Any]
    peer: Callable[[Any, Any, int], Any]
    """From our spec, its environments and a seed to Stable-Baselines3's model."""
    frames: int
    warm: int = 0
    """Frames after which nothing is compiled any more and learning goes on."""
    start: int = 0
    """Frames before the first update, which cost next to nothing."""


CASES = {
    "ppo": Case(EXAMPLES / "ppo_cartpole.yaml", ppo, 200_000),
    "dqn": Case(dqn_spec(), dqn, 50_000, warm=2048, start=1000),
    "dqn_every_4": Case(
        dqn_spec(update_every=4, replay_ratio=0.25, target_every=32), dqn, 50_000, warm=2048, start=1000
    ),
    "sac": Case(pendulum_spec("sac", start=100), sac, 12_000, warm=1024, start=100),
    "td3": Case(pendulum_spec("td3", start=1000, gamma=0.98), td3, 12_000, warm=2048, start=1000),
}


def ours(case: Case, seed: int, frames: int, arguments: argparse.Namespace) -> dict[str, float]:
    import palestra

    with tempfile.TemporaryDirectory() as root:
        start = time.perf_counter()
        palestra.run(
            case.spec,
            root=root,
            quiet=True,
            seed=seed,
            max_session=1,
            hooks=["__main__:tick"],
            train__compile=arguments.compile,
            train__precision=arguments.precision,
            train__frames=frames,
            every__eval=None,
        )
    return result(case, start)


def fast(seed: int) -> dict[str, float]:
    import palestra

    with tempfile.TemporaryDirectory() as root:
        rows = palestra.run(FAST, root=root, quiet=True, seed=seed, max_session=1).metrics()
    seconds = sum(row["time/collect"] + row["time/learn"] for row in rows)
    return {"train_s": seconds, "eval_return": rows[-1]["eval/return"], "frames": rows[-1]["frame"]}


def stable_baselines3(case: Case, seed: int, frames: int) -> dict[str, float]:
    import numpy as np
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    from palestra.spec.load import load

    class Tick(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def note(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            if returns:
                note(self.model.num_timesteps, float(np.mean(returns)))

        def _on_rollout_start(self) -> None:  # what came before has been learned from
            if self.model.num_timesteps >= TICK + (ticks[-1][2] if ticks else 0):
                self.note()

        def _on_training_end(self) -> None:
            self.note()

    torch.set_num_threads(1)
    spec: Any = load(case.spec).spec
    start = time.perf_counter()
    model = case.peer(spec, make_vec_env(spec.env.id, n_envs=spec.env.num_envs, seed=seed), seed)
    model.learn(frames, callback=Tick())
    return result(case, start)


def result(case: Case, start: float) -> dict[str, float]:
    first, first_cpu, first_frame, _ = next(tick for tick in ticks if tick[2] >= case.warm)
    last, last_cpu, last_frame, _ = ticks[-1]
    rate = (last_frame - first_frame) / (last - first)
    score = [value for *_, value in ticks][-max(WINDOW, len(ticks) // 4) :]
    # What came first took beyond the rest: importing, making environments and, where it is on, compiling.
    return {
        "fps": rate,
        "cpu_fps": (last_frame - first_frame) / (last_cpu - first_cpu),
        "score": sum(score) / len(score),
        "first_s": first - start - max(0, first_frame - case.start) / rate,
    }


def in_process(who: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that compiling is really done
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        options = ["--algorithm", arguments.algorithm, "--compile", arguments.compile]
        options += ["--precision", arguments.precision]
        options += [] if arguments.frames is None else ["--frames", str(arguments.frames)]
        options += ["--one", who, "--seed", str(seed)]
        done = subprocess.run([sys.executable, __file__, *options], env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, mine: list[dict[str, float]], peer: list[dict[str, float]], **more: Any) -> str:
    def mean(rows: list[dict[str, float]], key: str) -> float:
        return sum(row[key] for row in rows) / len(rows)

    content = {
        "bench": name,
        "ours": round(mean(mine, "fps")),
        "peer": "sb3",
        "theirs": round(mean(peer, "fps")),
        "ratio": round(mean(mine, "fps") / mean(peer, "fps"), 2),
        # By the process's own CPU time: what is left of the ratio on a machine that others use too.
        "cpu_ratio": round(mean(mine, "cpu_fps") / mean(peer, "cpu_fps"), 2),
        "score_ours": round(mean(mine, "score"), 2),
        "score_theirs": round(mean(peer, "score"), 2),
        "start_and_compile_s_ours": round(mean(mine, "first_s"), 1),
        "start_s_theirs": round(mean(peer, "first_s"), 1),
    }
    return json.dumps(content | more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=list(CASES), default="ppo")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--parallel", type=int, default=1, help="processes at a time, each on a core")
    parser.add_argument("--frames", type=int, default=None, help="instead of the case's own")
    parser.add_argument("--compile", choices=["on", "off"], default="on")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of our products")
    parser.add_argument("--one", choices=["ours", "sb3", "fast"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    case = CASES[arguments.algorithm]
    frames = case.frames if arguments.frames is None else arguments.frames
    if arguments.one == "ours":
        print(json.dumps(ours(case, arguments.seed, frames, arguments)))
        return
    if arguments.one == "fast":
        print(json.dumps(fast(arguments.seed)))
        return
    if arguments.one == "sb3":
        print(json.dumps(stable_baselines3(case, arguments.seed, frames)))
        return
    seeds = range(100, 100 + arguments.seeds)
    name = f"{arguments.algorithm}_cartpole" if arguments.algorithm == "ppo" else arguments.algorithm
    if arguments.algorithm == "ppo":
        solved = [in_process("fast", seed, arguments) for seed in seeds]
        worst = {"train_s_most": round(max(row["train_s"] for row in solved), 2)}
        worst |= {"eval_return_least": min(row["eval_return"] for row in solved), "frames": solved[0]["frames"]}
        print(json.dumps({"bench": "cartpole_solved", "spec": FAST.name, "seeds": arguments.seeds} | worst), flush=True)
    mine, peer = [], []
    with ThreadPoolExecutor(arguments.parallel) as pool:
        pairs = [[pool.submit(in_process, who, seed, arguments) for who in ("ours", "sb3")] for seed in seeds]
        for seed, (our, their) in zip(seeds, pairs, strict=True):
            mine.append(our.result())
            peer.append(their.result())
            print(line(name, mine[-1:], peer[-1:], seed=seed), flush=True)
    settings = {"frames": frames, "compile": arguments.compile, "precision": arguments.precision}
    settings |= {"parallel": arguments.parallel, "machine": platform.machine()}
    print(line(name, mine, peer, seeds=arguments.seeds, **settings))


if __name__ == "__main__":
    main()
