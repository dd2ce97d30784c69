"""PPO on CartPole at SLM-Lab's published hyper-parameters, beside Stable-Baselines3 at the same ones.

    make bench            # or: python benchmarks/control_cpu.py --seeds 4

Both train the same seeds, one process after the other, on one torch thread. Frames/s are those of the training loop
from the end of its first step to its end, with logging and checkpoints, without evaluation; what starting and compiling
took is printed apart.
The score of both is `total_reward_ma`: the mean, over the last 100 steps, of the mean return of the last 100 episodes.
One JSON line for each seed, and one for all. Before that, how long the fast spec trains, eagerly, to solve CartPole.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples" / "control"
SPEC = EXAMPLES / "ppo_cartpole.yaml"
FAST = EXAMPLES / "ppo_cartpole_fast.yaml"
WINDOW = 100

ticks: list[tuple[float, int, float]] = []  # (seconds, frame, mean return of the last 100 episodes) after each step


def tick(moment: Any) -> None:
    """The hook that notes when each of our steps ended."""
    ticks.append((time.perf_counter(), moment.frame, moment.metrics["return"]))


def ours(seed: int, frames: int, compile: str) -> dict[str, float]:
    import palestra

    with tempfile.TemporaryDirectory() as root:
        start = time.perf_counter()
        palestra.run(
            SPEC,
            root=root,
            quiet=True,
            seed=seed,
            max_session=1,
            hooks=["__main__:tick"],
            train__compile=compile,
            train__frames=frames,
            every__eval=None,
        )
    return result(start)


def fast(seed: int) -> dict[str, float]:
    import palestra

    with tempfile.TemporaryDirectory() as root:
        rows = palestra.run(FAST, root=root, quiet=True, seed=seed, max_session=1).metrics()
    seconds = sum(row["time/collect"] + row["time/learn"] for row in rows)
    return {"train_s": seconds, "eval_return": rows[-1]["eval/return"], "frames": rows[-1]["frame"]}


def stable_baselines3(seed: int, frames: int) -> dict[str, float]:
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    from palestra.spec import load

    class Tick(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def note(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            ticks.append((time.perf_counter(), self.model.num_timesteps, float(np.mean(returns))))

        def _on_rollout_start(self) -> None:  # the step before has been learned from
            if self.model.num_timesteps:
                self.note()

        def _on_training_end(self) -> None:
            self.note()

    torch.set_num_threads(1)
    spec: Any = load(SPEC).spec
    algorithm = spec.algorithm
    start = time.perf_counter()
    model = PPO(
        "MlpPolicy",
        make_vec_env(spec.env.id, n_envs=spec.env.num_envs, seed=seed),
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
    model.learn(frames, callback=Tick())
    return result(start)


def result(start: float) -> dict[str, float]:
    (first, first_frame, _), (last, last_frame, _) = ticks[0], ticks[-1]
    rate = (last_frame - first_frame) / (last - first)
    score = [value for _, _, value in ticks][-WINDOW:]
    # What the first step took beyond the others: importing, making environments and, where it is on, compiling.
    return {"fps": rate, "score": sum(score) / len(score), "first_s": first - start - first_frame / rate}


def in_process(who: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that compiling is really done
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        options = ["--frames", str(arguments.frames), "--compile", arguments.compile, "--one", who, "--seed", str(seed)]
        done = subprocess.run([sys.executable, __file__, *options], env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def line(mine: list[dict[str, float]], peer: list[dict[str, float]], **more: Any) -> str:
    def mean(rows: list[dict[str, float]], key: str) -> float:
        return sum(row[key] for row in rows) / len(rows)

    content = {
        "bench": "ppo_cartpole",
        "ours": round(mean(mine, "fps")),
        "peer": "sb3",
        "theirs": round(mean(peer, "fps")),
        "ratio": round(mean(mine, "fps") / mean(peer, "fps"), 2),
        "score_ours": round(mean(mine, "score"), 2),
        "score_theirs": round(mean(peer, "score"), 2),
        "start_and_compile_s_ours": round(mean(mine, "first_s"), 1),
        "start_s_theirs": round(mean(peer, "first_s"), 1),
    }
    return json.dumps(content | more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--compile", choices=["on", "off"], default="on")
    parser.add_argument("--one", choices=["ours", "sb3", "fast"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one == "ours":
        print(json.dumps(ours(arguments.seed, arguments.frames, arguments.compile)))
        return
    if arguments.one == "fast":
        print(json.dumps(fast(arguments.seed)))
        return
    if arguments.one == "sb3":
        print(json.dumps(stable_baselines3(arguments.seed, arguments.frames)))
        return
    solved = [in_process("fast", seed, arguments) for seed in range(arguments.seeds)]
    worst = {"train_s_most": round(max(row["train_s"] for row in solved), 2)}
    worst |= {"eval_return_least": min(row["eval_return"] for row in solved), "frames": solved[0]["frames"]}
    print(json.dumps({"bench": "cartpole_solved", "spec": FAST.name, "seeds": arguments.seeds} | worst), flush=True)
    mine, peer = [], []
    for seed in range(arguments.seeds):
        mine.append(in_process("ours", seed, arguments))
        peer.append(in_process("sb3", seed, arguments))
        print(line(mine[-1:], peer[-1:], seed=seed), flush=True)
    print(line(mine, peer, seeds=arguments.seeds, frames=arguments.frames, compile=arguments.compile))


if __name__ == "__main__":
    main()
