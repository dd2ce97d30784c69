"""Runs, a search and a pipeline to look at without training any: made up here, written by what writes real ones."""

import json
import math
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.data.tokenizers import Tokenizer, character_tokenizer
from palestra.pipeline.data import data_step
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.report import write_report
from palestra.pipeline.runner import run
from palestra.rollout.records import FILE, RolloutRecord, write
from palestra.rollout.types import Group, Trajectory
from palestra.runs.manifest import manifest
from palestra.runs.recorder import Recorder
from palestra.runs.run import Run, new_trial
from palestra.runs.session import Session
from palestra.runs.store import write_json
from palestra.search.results import new_experiment, write_results
from palestra.search.study import TrialRecord
from palestra.spec.load import load, spec_hash, to_yaml
from palestra.spec.model import plain
from palestra.tasks.task import Problem, Status, Verdict
from palestra.track.sinks import JsonlSink
from palestra.track.trace import encode

COMMAND = ("palestra", "view", "--demo")
SPECS = tomllib.loads(Path(__file__).with_name("demo.toml").read_text(encoding="utf-8"))
LANES = ("trainer/0", "generator/0", "generator/1", "generator/2", "generator/3", "verifier/0", "verifier/1", "sync")


def make_demo(root: Path) -> None:
    """Two post-training runs with stale completions, a control run over seeds, a search: nothing in them was measured.

    The pipeline is real: its steps filter, deduplicate and tokenize made-up documents.
    """
    for lr, skill in ((1e-5, 0.05), (4e-5, 0.12)):
        _posttrain(*_trial(root, SPECS["posttrain"] | {"optim": {"name": "adamw", "lr": lr}}), random.Random(0), skill)
    _control(*_trial(root, SPECS["control"]))
    _search(root, random.Random(0))
    _pipeline(root / "demo_pipeline", random.Random(0))


def _trial(root: Path, data: dict[str, Any]) -> tuple[Run, Any]:
    spec = load(data).spec
    trial = new_trial(root, spec.name, seeds=spec.seeds, command=COMMAND, spec=plain(spec))
    for seed in spec.seeds:
        about = manifest(spec_hash=spec_hash(spec), seed=seed, command=COMMAND)
        Session.create(trial.session(seed), spec_yaml=to_yaml(spec), spec_data=plain(spec), manifest=about)
    write_json(trial.path / "notes.json", {"tags": ["demo"], "text": "Made up by palestra view --demo, not trained."})
    return trial, spec


def _posttrain(trial: Run, spec: Any, chance: random.Random, skill: float) -> None:
    folder, steps = trial.session(0), spec.train.steps
    tokenizer = character_tokenizer([chr(code) for code in range(32, 127)] + ["\n", "é", "✓"])
    tokenizer.save(folder / "checkpoints" / f"step_{steps:09}" / "model")
    spans = sorted(_spans(chance, steps), key=lambda event: event["ts"] + event["dur"])
    tracks = [{"ph": "M", "name": "start", "args": {"unix_ns": 1_700_000_000_000_000_000}}]
    tracks += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": t, "args": {"name": n}} for t, n in enumerate(LANES)]
    (folder / "trace.json").write_text("[\n" + ",\n".join(map(encode, [*tracks, *spans])))
    with Session.open(folder) as session, Recorder(session, spec, total=1, unit="steps", show=False) as record:
        sink, tokens, filtered = JsonlSink(folder / FILE), 0, 0
        for step in range(1, steps + 1):
            right = 1 - 0.85 * math.exp(-skill * step)
            groups = [_group(chance, tokenizer, 8 * step + number, step, right) for number in range(8)]
            records = sorted((_recorded(group, step) for group in groups), key=lambda record: record.fate)
            write(sink, *records)
            completions = [t for group in groups for t in group.trajectories]
            tokens += sum(t.sampled for t in completions)
            filtered += sum(record.fate == "filtered" for record in records)
            row = {
                "reward": fmean(t.reward for t in completions), "entropy": 1.1 * math.exp(-0.03 * step),
                "kl_reference": 0.002 * step + chance.uniform(0, 0.003), "kl_behaviour": chance.uniform(1e-3, 2e-3),
                "length": fmean(t.sampled for t in completions), "truncated": 0.0, "grad_norm": 0.5 - 0.002 * step,
                "staleness": 0.8, "staleness/0": 0.4, "staleness/1": 0.4, "staleness/2": 0.2, "rollout/running": 16.0,
                "rollout/ready": step % 7.0, "fate/trained": 8.0 * step - filtered, "fate/filtered": float(filtered),
            }  # fmt: skip
            if step % 10 == 0:
                row |= {"eval/accuracy": right - 0.05, "eval/accuracy_se": math.sqrt(right * (1 - right) / 200)}
            record.row(row, {"steps": step, "tokens": tokens}, headline=["eval/accuracy", "reward"])
        sink.close()


def _group(chance: random.Random, tokenizer: Tokenizer, number: int, step: int, right: float) -> Group:
    a, b, odd = chance.randrange(10, 99), chance.randrange(10, 99), chance.random()
    trajectories = []
    for _ in range(8):
        correct = chance.random() < right
        total = a + b if correct else a + b - 10 * chance.randrange(1, 3)
        text = f"{a}+{b}: {a % 10}+{b % 10}={a % 10 + b % 10}, so {total} ✓\n"
        text = "carry the one, " * 20 if odd < 0.04 else "<script>alert('not run')</script>" if odd > 0.98 else text
        prompt, ids = tokenizer.encode(f"{a}+{b}="), tokenizer.encode(text)
        before, version = len(prompt), max(0, step - 1 - chance.randrange(3))
        trajectories.append(Trajectory(
            tokens=(*prompt, *ids), loss_mask=(*[False] * before, *[True] * len(ids)),
            logprobs=(*[0.0] * before, *(-chance.expovariate(2.0) for _ in ids)), reward=float(correct),
            versions=(*[-1] * before, *[version] * len(ids)), completion=text, turns=((before, before + len(ids)),),
            verdict=Verdict(float(correct), Status.CORRECT if correct else Status.WRONG, note=str(total)),
            stop_reason="eos",
        ))  # fmt: skip
    problem = Problem(f"arithmetic/train/{number % 64}", f"{a}+{b}=", {"answer": str(a + b)})
    return Group(number, problem, max(0, step - 2), tuple(trajectories), 8, chance.uniform(0.5, 2.0))


def _recorded(group: Group, step: int) -> RolloutRecord:
    if len(set(group.rewards)) == 1:
        return RolloutRecord(group, "filtered", step)
    mean = fmean(group.rewards)
    advantages = (tuple((t.reward - mean) * sampled for sampled in t.loss_mask) for t in group.trajectories)
    factors = {"entropy": -0.6, "trained_logprobs": 0.97}.items()
    scores = [{name: [round(by * p, 4) for p in t.logprobs] for name, by in factors} for t in group.trajectories]
    return RolloutRecord(group, "trained", step, tuple(advantages), tuple(scores))


def _spans(chance: random.Random, steps: int) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        wait, begin = chance.uniform(0.4, 1.6), 5.0 * (step - 1)
        spans = [("rollout", 0, 0.0, wait), ("train", 0, wait, 4.6 - wait), ("publish", 0, 4.6, 0.3)]
        spans += [("sync", 7, 4.6, 0.3)]
        spans += [("sample", lane, 1.6 * n, chance.uniform(0.8, 1.5)) for lane in range(1, 5) for n in range(3)]
        spans += [("verify", lane, chance.uniform(1, 3), chance.uniform(0.2, 0.8)) for lane in (5, 6)]
        for name, lane, start, seconds in spans:
            at = {"ts": round((begin + start) * 1e6, 3), "dur": round(seconds * 1e6, 3)}
            yield {"ph": "X", "name": name, "pid": 1, "tid": lane, **at, "args": {"step": step}}


def _control(trial: Run, spec: Any) -> None:
    for seed in spec.seeds:
        chance, folder = random.Random(seed), trial.session(seed)
        with Session.open(folder) as session, Recorder(session, spec, total=1, unit="frames", show=False) as record:
            for step in range(1, 101):
                value = 500 / (1 + math.exp(-(step - 40 - 8 * chance.random()) / 9))
                row = {"return": value, "loss": math.exp(-step / 60), "entropy": 0.69 * math.exp(-step / 80)}
                row |= {"eval/return": min(500.0, value + chance.uniform(0, 20))} if step % 10 == 0 else {}
                record.row(row, {"steps": step, "frames": 200 * step}, headline=["eval/return", "return"])


def _search(root: Path, chance: random.Random) -> None:
    spec, records = load(SPECS["control"] | SPECS["search"]).spec, []
    for number in range(spec.search.trials):
        power, epochs = chance.uniform(-4, -2), chance.randrange(4, 13)
        score = 420 - 200 * abs(power + 3) + 4 * epochs + chance.uniform(0, 30)
        values = {"algorithm.lr": 10**power, "algorithm.epochs": epochs}
        records.append(TrialRecord(number, values, 0, {0: score}, "complete", score))
    write_results(new_experiment(root, spec, COMMAND), spec, spec.search, records)


def _pipeline(root: Path, chance: random.Random) -> None:
    words = ("the old sailor", "and a small boat", "of cedar", "went to the harbor", "with that silver lantern")
    texts = [" ".join(chance.choices(words, k=chance.choice((9, 70, 90)))) for _ in range(120)]
    root.mkdir(parents=True)
    rows = (json.dumps({"id": f"page {n}", "text": text}) + "\n" for n, text in enumerate([*texts, *texts[:12]]))
    (root / "pages.jsonl").write_text("".join(rows))
    clean = data_step("filter")(source=str(root / "pages.jsonl"), repetition=False, workers=1)
    unique = data_step("dedup_exact")(source=clean, workers=1)
    tokenizer = data_step("train_tokenizer")(source=unique, vocab_size=400)
    tokens = data_step("tokenize")(source=unique, tokenizer=tokenizer, workers=1)
    made = run([tokens], Outputs(root / "outputs"), max_parallel=1)
    write_report("demo_pipeline", made.graph, made.outputs, made.states)
