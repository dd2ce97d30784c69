"""Seconds of a GRPO step on the CPU beside TRL's `GRPOTrainer`, and the reward that both reach.

TRL has an environment of its own, which must not get torchvision:

    uv venv trl-venv && uv pip install --python trl-venv/bin/python trl 'torch<=2.13.0'
    python benchmarks/grpo_cpu.py --peer-python trl-venv/bin/python

Both start from one model folder and take the same prompts in the same order, with the same group, lengths, rewards,
loss (Dr. GRPO without KL), AdamW and number of updates, on the same number of threads. They run side by side, and only
one at a time: each step of ours is followed by one of theirs. Both compute in bf16 unless told otherwise; on a CPU TRL
is faster in FP32 than in its own default, so it runs twice, once in each, and `trl_precision` says which ratio a line
is of. Ours is in bf16, a spec's default, unless `--precision fp32` is given. Two sizes:

- `small`: 0.87M parameters, 16 prompts × 8 answers of 32 tokens without an early stop; the reward is the share of
  digits in an answer.
- `quickstart`: the model, batch and reward of examples/quickstart. Its first part, the lessons, takes a minute;
  `--taught RUN` takes a run of sft.yaml that is there.

Ours is the kind `posttrain` as `palestra train` runs it. `step_s` is the median of time/rollout + time/train +
time/publish; `wall_s` is all that lies between two steps, with the writing of metrics and rollouts, for both. `cpu_s`
is the time of the processor, which other programs on the machine change less. `reward_first` and `reward_last` are
means over a tenth of the steps. One JSON line a size and precision of TRL.
"""

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
PRECISIONS = ("bf16", "fp32")
WARM_UP = 3
"""Steps that do not count: caches, pages and first calls."""


@dataclass(frozen=True)
class Size:
    """What both are given."""

    prompts: int
    group: int
    new_tokens: int
    steps: int
    lr: float
    stops: bool
    """Whether the model's end token ends an answer."""


SIZES = {
    "small": Size(prompts=16, group=8, new_tokens=32, steps=40, lr=1e-3, stops=False),
    "quickstart": Size(prompts=64, group=8, new_tokens=5, steps=80, lr=5e-4, stops=True),
}


# ---- what both are given


def digits(completion: str, **row: Any) -> float:
    """The reward of `small`: the share of an answer's characters that are digits."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def right(completion: str, answer: str) -> float:
    """The reward of `quickstart`, as the task itself judges."""
    return float(completion.strip() == answer)


def prepare(folder: Path, name: str, taught: str | None) -> None:
    """Write the model and the prompts that both read."""
    import torch

    from palestra.data.tokenizers import Tokenizer, character_tokenizer
    from palestra.kinds.models import open_model
    from palestra.lm.hf import save_pretrained
    from palestra.lm.model import Transformer
    from palestra.spec.shape import Shape
    from palestra.tasks.task import make_task

    size = SIZES[name]
    if name == "small":
        character_tokenizer("".join(map(chr, range(32, 127)))).save(folder / "tokenizer")
        # Without an end token nothing ends an answer early.
        (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
        made = Tokenizer.load(folder / "tokenizer")
        shape = Shape(layers=4, width=128, heads=4, mlp=384, context=64, vocab=made.vocab_size, tied=True)
        model = Transformer(shape)
        model.initialize(torch.Generator().manual_seed(0))
        save_pretrained(folder / "model", model, tokenizer=made, eos=())
    else:
        loaded, made = open_model(taught or teach(folder), folder)
        assert made.eos is not None
        save_pretrained(folder / "model", loaded.model, tokenizer=made, eos=(made.eos,))
    problems = make_task("arithmetic", {"digits": 2}).problems("train")
    chosen = random.Random(0).sample(range(len(problems)), size.prompts * size.steps)
    rows = [problems[i] for i in chosen]
    (folder / "order.txt").write_text("".join(row.id + "\n" for row in rows))
    told = [{"prompt": row.prompt, "answer": row.row["answer"]} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


def teach(folder: Path) -> str:
    """The first part of the quickstart."""
    import palestra

    lessons = folder / "lessons.jsonl"
    subprocess.run([sys.executable, QUICKSTART / "teacher.py", lessons], check=True)
    overrides = {"data.train.lessons.path": str(lessons)}
    return str(palestra.run(QUICKSTART / "sft.yaml", root=folder / "runs", quiet=True, overrides=overrides).path)


# ---- the two, each in a process of its own


class Turns:
    """Lets a step happen each time a line comes in, and answers with what it took; the first one begins by itself."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever else is printed is not an answer
        self.began: tuple[float, float] | None = None

    def end(self, **told: Any) -> None:
        """A step has ended: say so and wait for the next turn."""
        if self.began is not None:
            told |= {"wall_s": time.perf_counter() - self.began[0], "cpu_s": time.process_time() - self.began[1]}
        self.say(told)
        sys.stdin.readline()
        self.began = (time.perf_counter(), time.process_time())

    def say(self, told: dict[str, Any]) -> None:
        """One line to the parent."""
        self.answers.write(json.dumps(told) + "\n")
        self.answers.flush()


turns: Turns


def tick(moment: Any) -> None:
    """The hook at the end of each of our steps."""
    turns.end(reward=moment.metrics["reward"])


def ours(folder: Path, name: str, threads: int, precision: str) -> None:
    import palestra
    from palestra.tasks.rewards.rewards import reward

    size, reward_of = SIZES[name], None
    if name == "small":
        reward(isolated=False)(digits)
        reward_of = {"function": "__main__:digits"}
    stop = {} if size.stops else {"stop": []}
    task = {"task": "arithmetic", "args": {"digits": 2, **stop}, "order": str(folder / "order.txt")}
    run = palestra.run(
        {
            "kind": "posttrain",
            "name": f"grpo_{name}",
            "model": {"init": str(folder / "model")},
            "tasks": {"train": [task | ({} if reward_of is None else {"reward": reward_of})]},
            "rollout": {"group": size.group, "max_new_tokens": size.new_tokens, "max_prompt_tokens": 8},
            "algorithm": {"preset": "dr_grpo"},
            "train": {"steps": size.steps, "prompts_per_step": size.prompts, "precision": precision},
            "optim": {
                "name": "adamw",
                "lr": {"shape": "linear", "start": size.lr, "end": 0},
                "betas": [0.9, 0.999],
                "weight_decay": 0,
            },
            "every": {"eval": None},
            "hooks": ["__main__:tick"],
            "threads": threads,
        },
        root=folder / "runs",
        quiet=True,
    )
    rows = [row for row in run.metrics(0) if "time/train" in row]
    turns.say(
        {
            "step_s": [row["time/rollout"] + row["time/train"] + row["time/publish"] for row in rows],
            "rollout_s": [row["time/rollout"] for row in rows],
            "train_s": [row["time/train"] for row in rows],
            "versions": versions("palestra", "torch"),
        }
    )


def theirs(folder: Path, name: str, threads: int, precision: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    size = SIZES[name]
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    # All prompts are equally long, so nothing is padded; but there must be a token for it.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if not size.stops:
        tokenizer.add_special_tokens({"eos_token": "<never>"})
        assert tokenizer.eos_token_id >= model.config.vocab_size, "a token that the model cannot draw"
    rewards: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        if name == "small":
            found = [digits(text) for text in completions]
        else:
            found = [right(text, expected) for text, expected in zip(completions, answer, strict=True)]
        rewards.append(statistics.fmean(found))
        return found

    class Tick(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(reward=rewards[-1])

    config = GRPOConfig(
        output_dir=str(folder / f"trl_{precision}"),
        use_cpu=True,
        bf16=precision == "bf16",
        gradient_checkpointing=False,
        per_device_train_batch_size=size.prompts * size.group,
        num_generations=size.group,
        max_completion_length=size.new_tokens,
        max_steps=size.steps,
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        learning_rate=size.lr,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Tick()],
    ).train()
    turns.say({"versions": versions("trl", "transformers", "torch")})


def versions(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in names}


# ---- both, in turns


def compare(
    folder: Path, name: str, threads: int, pythons: dict[str, str], precisions: dict[str, str]
) -> dict[str, Any]:
    """Run both, a step of one and a step of the other."""
    size = SIZES[name]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command = [
        __file__,
        "--sizes",
        name,
        "--threads",
        str(threads),
        "--steps",
        str(size.steps),
        "--folder",
        str(folder),
    ]
    sides = {
        who: subprocess.Popen(
            [python, *command, "--one", who, "--precision", precisions[who]],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for who, python in pythons.items()
    }
    try:
        steps: dict[str, list[dict[str, float]]] = {who: [answer(process)] for who, process in sides.items()}
        for _ in range(size.steps - 1):
            for who, process in sides.items():
                go(process)
                steps[who].append(answer(process))
        ends = {}
        for who, process in sides.items():
            go(process)
            ends[who] = answer(process)
            process.wait()
    finally:
        for process in sides.values():
            process.kill()
    found = summary(name, threads, steps["ours"], steps["trl"], ends["ours"], ends["trl"])
    return found | {"precision": precisions["ours"], "trl_precision": precisions["trl"]}


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} ended with {process.wait()} before its last step: see above")
    return json.loads(line)


def summary(
    name: str,
    threads: int,
    mine: Sequence[dict[str, float]],
    peer: Sequence[dict[str, float]],
    end: dict[str, Any],
    peer_end: dict[str, Any],
) -> dict[str, Any]:
    def median(rows: Sequence[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in rows[WARM_UP:])

    def rewards(rows: Sequence[dict[str, float]]) -> dict[str, float]:
        tenth = max(1, len(rows) // 10)
        values = [row["reward"] for row in rows]
        found = {"first": statistics.fmean(values[:tenth]), "last": statistics.fmean(values[-tenth:])}
        return {key: round(value, 3) for key, value in found.items()}

    size, step = SIZES[name], statistics.median(end["step_s"][WARM_UP:])
    content: dict[str, Any] = {
        "bench": "grpo_cpu",
        "size": name,
        "completions": size.prompts * size.group,
        "new_tokens": size.new_tokens,
        "steps": size.steps,
        "threads": threads,
        "step_s": round(step, 4),
        "rollout_s": round(statistics.median(end["rollout_s"][WARM_UP:]), 4),
        "train_s": round(statistics.median(end["train_s"][WARM_UP:]), 4),
    }
    for key in ("wall_s", "cpu_s"):
        content |= {key: round(median(mine, key), 4), f"trl_{key}": round(median(peer, key), 4)}
    content["ratio"] = round(content["trl_wall_s"] / step, 2)
    content["ratio_wall"] = round(content["trl_wall_s"] / content["wall_s"], 2)
    content["ratio_cpu"] = round(content["trl_cpu_s"] / content["cpu_s"], 2)
    content |= {f"reward_{key}": value for key, value in rewards(mine).items()}
    content |= {f"trl_reward_{key}": value for key, value in rewards(peer).items()}
    return content | end["versions"] | peer_end["versions"]


def main() -> None:
    global turns
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the interpreter of the environment with TRL")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of ours")
    parser.add_argument("--peer-precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of TRL")
    parser.add_argument("--steps", type=int, help="updates of both; without it 40 and 80")
    parser.add_argument("--taught", help="a run of examples/quickstart/sft.yaml; without it one is made")
    parser.add_argument("--one", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps is not None:
        SIZES.update({name: replace(size, steps=given.steps) for name, size in SIZES.items()})
    if given.one is not None:
        turns = Turns()
        side = ours if given.one == "ours" else theirs
        side(given.folder, given.sizes[0], given.threads[0], given.precision)
        return
    if given.peer_python is None:
        parser.error("--peer-python: the interpreter of an environment with TRL; --help says how to make one")
    pythons = {"ours": sys.executable, "trl": given.peer_python}
    for name in given.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            prepare(Path(scratch), name, given.taught)
            for threads, precision in product(given.threads, given.peer_precisions):
                precisions = {"ours": given.precision, "trl": precision}
                print(json.dumps(compare(Path(scratch), name, threads, pythons, precisions)), flush=True)


if __name__ == "__main__":
    main()
