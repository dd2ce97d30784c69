"""Advice on a run from its files: what is broken, in words with the numbers; if nothing is, what could be tuned.

A check reads the rows since the last resume, the recent ones against those before and by medians: one bad row says
nothing, and what was mended is not told again. Its level and words are in rules.toml. Where there is too little to
judge by, numbers are NaN, which no comparison holds for.
"""

import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from palestra.runs import checkpoint as checkpoints
from palestra.runs.run import Run
from palestra.runs.session import read_status, state_of
from palestra.runs.store import read_json

ENDS = 1 << 19  # bytes of metrics.jsonl that are read at each end: the first rows, and as many of the last
RECENT = 20  # rows
ENOUGH = 10  # rows, with fewer of which nothing is said
LONG = 60.0  # seconds of recent rows, below which no time is worth saving
LOOP = ("rollout", "train", "publish", "record")
ASIDE = {"every.eval": ("eval", "suites"), "every.checkpoint": ("checkpoint",), "samples.every": ("sample",)}
SPANS = (*LOOP, "collect", "learn", "interact", *(name for names in ASIDE.values() for name in names))
"""Under `time/`: what the trainer does, one after the other."""
LEARNED = {"control": ("return", "enjoy"), "posttrain": ("reward", "rollouts")}
"""By kind, what learning raises, and the command that shows the policy; a loss falls."""
NAN = math.nan
RULES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
"""Level, title, condition and text of each, in the order in which they are told."""

Found = tuple[bool, dict[str, Any]]
"""Whether a check fires, and what its text is filled with."""


@dataclass(frozen=True)
class Advice:
    """What a rule says about a run."""

    rule: str
    level: str
    """alarm or tuning."""
    title: str
    text: str
    """With the numbers and what to do."""
    values: dict[str, Any]
    """What the text was filled with."""
    step: int | None
    """The last step that it was judged by."""


def advise(run: Run) -> list[Advice]:
    """The alarms of a run, the gravest first; without any, what could be tuned. Of several seeds each is named.

    Of a run that does not learn both are told: what could be tuned may be why.
    """
    sessions: list[Seen] = []
    sessions += [Seen(session, sessions) for session in run.sessions]
    advice: list[Advice] = []
    for name, about in RULES.items():
        if about["level"] == "tuning" and {one.rule for one in advice if one.level == "alarm"} - {"no_progress"}:
            break
        for seen in sessions:
            fires, values = CHECKS[name](seen)
            if fires:
                text = re.sub(r"(\d)%", r"\1 %", about["text"].format(**values))
                where = f"seed {seen.session.seed}: " if len(sessions) > 1 else ""
                step = int(seen.rows[-1]["step"]) if seen.rows else None
                advice.append(Advice(name, about["level"], about["title"], where + text, values, step))
    return advice


class Seen:
    """A session as the checks see it, and all of its trial."""

    def __init__(self, session: Run, trial: "list[Seen]"):
        self.session, self.trial, self.spec = session, trial, session.spec
        self.state, self.status = state_of(session.path), read_status(session.path) or {}

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """The numbers of the first and the last rows since the last resume; torn and foreign lines are left out."""
        resumed = re.findall(rb"resumed at step (\d+)", ends(self.session.path / "log.txt"))
        first, rows = int(resumed[-1]) if resumed else 0, []
        for line in ends(self.session.path / "metrics.jsonl").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] > first:
                rows.append({name: value for name, value in row.items() if isinstance(value, int | float)})
        return rows

    def all(self, metric: str) -> list[float]:
        """Every finite value."""
        return [row[metric] for row in self.rows if math.isfinite(row.get(metric, NAN))]

    def recent(self, metric: str, by: Callable[[list[float]], float] = fmean) -> float:
        """The mean of the last rows."""
        values = self.all(metric)
        return by(values[-RECENT:]) if len(values) >= ENOUGH else NAN

    def last(self, metric: str) -> tuple[float, float]:
        """The median of the last five rows, and of all before."""
        values = self.all(metric)
        return (median(values[-5:]), median(values[:-5])) if len(values) >= 2 * ENOUGH else (NAN, NAN)

    def quarters(self, metric: str) -> tuple[float, float, float]:
        """The medians of the first and of the last quarter of the rows, and the deviation of such a median."""
        values = self.all(metric)
        if len(values) < 2 * ENOUGH:
            return NAN, NAN, NAN
        quarter = len(values) // 4
        # 1.4826 / √2 makes a deviation of a median of differences, and 1.25 / √n that of a median.
        noise = 1.31 * median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(quarter)
        return median(values[:quarter]), median(values[-quarter:]), noise

    def grown(self, counter: str) -> float:
        """By how much a counter grew over the last rows."""
        values = self.all(counter)[-RECENT:]
        return values[-1] - values[0] if values else 0.0

    def own(self, name: str) -> str:
        """The metric of a control algorithm, `ppo/entropy`, or of a language model, `entropy`."""
        return f"{self.spec['algorithm']['name']}/{name}" if self.spec["kind"] == "control" else name

    def setting(self, block: str, name: str) -> Any:
        """A field of the spec; NaN if this kind has none."""
        return (self.spec.get(block) or {}).get(name, NAN)

    @property
    def progress(self) -> float:
        """The fraction of the run that is done."""
        unit, row = "frame" if self.spec["kind"] == "control" else "step", self.rows[-1] if self.rows else {}
        return row.get(unit, NAN) / self.setting("train", f"{unit}s")

    def seconds(self, *spans: str) -> float:
        """Of some spans over the last rows; NaN where all together take too little to matter."""
        took = {name: sum(row.get(f"time/{name}", 0.0) for row in self.rows[-RECENT:]) for name in SPANS}
        return sum(took[name] for name in spans) if sum(took.values()) >= LONG else NAN

    @property
    def elsewhere(self) -> bool:
        """Whether other processes generate."""
        return isinstance(self.setting("rollout", "generator"), dict) or self.setting("cluster", "generators") > 0


def ends(path: Path) -> bytes:
    """The first and the last bytes of a file; nothing of one that is not there."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        first = file.read(ENDS)
        file.seek(max(ENDS, os.fstat(file.fileno()).st_size - ENDS))
        return first + (b"\n" if file.tell() > ENDS else b"") + file.read(ENDS)


def _failed(seen: Seen) -> Found:
    killed = "Its process ended without a word: killed by hand, by a scheduler, or for want of memory"
    reason = killed if seen.state == "killed" else (seen.status.get("reason") or "").rstrip(".")
    return seen.state in ("failed", "killed"), {"reason": reason, "path": str(seen.session.trial.path)}


def _stalled(seen: Seen) -> Found:
    if seen.state != "running" or not seen.rows:
        return False, {}
    silent = seen.status["heartbeat"] - (seen.session.path / "metrics.jsonl").stat().st_mtime
    usual = max(sum(row.get(f"time/{name}", 0.0) for name in SPANS) for row in seen.rows[-RECENT:])
    return silent > max(2 * LONG, 10 * usual), {"minutes": silent / 60, "usual": usual}


def _non_finite(seen: Seen) -> Found:
    skipped, steps = seen.grown("skipped_steps"), seen.grown("step")
    return skipped >= max(2, 0.05 * steps), {"skipped": skipped, "steps": steps}


def _exploding(seen: Seen) -> Found:
    norm, before = seen.last(seen.own("grad_norm"))
    return norm > 30 * before > 0, {"norm": norm, "before": before, "times": norm / (before or 1)}


def _no_gradient(seen: Seen) -> Found:
    share = seen.recent(seen.own("grad_norm"), by=lambda norms: fmean(norm == 0 for norm in norms))
    return share > 0.5, {"share": share}


def _loss_spike(seen: Seen) -> Found:
    losses = seen.all("loss") if seen.spec["kind"] not in ("control", "posttrain", "distill") else []
    windows = [median(losses[at : at + 5]) for at in range(len(losses) - 4)]
    if len(losses) < 2 * ENOUGH:
        return False, {}
    loss, best, noise = windows[-1], min(windows), seen.quarters("loss")[2] * math.sqrt(len(losses) // 4)
    return loss > max(1.25 * best, best + 5 * noise), {"loss": loss, "best": best}


def _uniform(seen: Seen) -> Found:
    loss = seen.recent("loss") if seen.spec["kind"] in ("pretrain", "sft") else NAN
    configs = [meta.path / "model" / "config.json" for meta in checkpoints.metas(seen.session.path)]
    config = next((read_json(path) for path in configs if path.exists()), {})
    vocabulary = config.get("vocab_size") or config.get("shape", {}).get("vocab", NAN)
    values = {"loss": loss, "vocabulary": vocabulary, "guess": math.log(vocabulary), "progress": seen.progress}
    return 0.97 < loss / values["guess"] < 1.1 and seen.progress > 0.2, values


def _entropy_collapse(seen: Seen) -> Found:
    before, entropy, _ = seen.quarters(seen.own("entropy"))
    control = seen.spec["kind"] == "control"
    first, last, noise = seen.quarters("return" if control else "status/correct")
    poor = last < first + 3 * noise if control else last < 0.8
    values = {"what": "the return" if control else "the share of correct completions", "first": first, "last": last}
    return 0 <= entropy < 0.1 * before and poor, values | {"entropy": entropy, "before": before}


def _mismatch(seen: Seen) -> Found:
    before, k3, _ = seen.quarters("mismatch")
    return k3 > 0.01 or k3 > max(1e-3, 5 * before), {"k3": k3, "before": before}


def _held_out(seen: Seen) -> Found:
    metric = next((name for name in ("eval/accuracy", "eval/pass@1") if seen.all(name)), None)
    rows = [row for row in seen.rows if metric in row]
    if metric is None or len(rows) < 2:
        return False, {}
    best, last, error = max(rows, key=lambda row: row[metric]), rows[-1], f"/{metric.removeprefix('eval/')}_se"
    errors = [row[name] for row in (best, last) for name in row if name.endswith(error)]
    margin = max(0.03, 3 * math.hypot(*errors) / max(1, len(errors) // 2))
    old = [row["reward"] for row in seen.rows if "reward" in row and row["step"] <= best["step"]]
    before, reward = (median(some[-5:] or [NAN]) for some in (old, seen.all("reward")[len(old) :]))
    values = {"metric": metric, "best": best[metric], "at": best["step"], "last": last[metric]}
    return last[metric] < best[metric] - margin and reward > before, values | {"before": before, "reward": reward}


def _hacked(seen: Seen) -> Found:
    before, reward, noise = seen.quarters("reward")
    correct_before, correct, error = seen.quarters("status/correct")
    parts = {name: seen.quarters(name) for name in (seen.rows or [{}])[-1] if name.startswith("part/")}
    part = max(parts, key=lambda name: parts[name][1] - parts[name][0], default="none has risen")
    values = {"before": before, "reward": reward, "correct_before": correct_before, "correct": correct, "part": part}
    return reward > before + 4 * noise and correct < correct_before - max(4 * error, 0.05), values


def _kl_runaway(seen: Seen) -> Found:
    kl, before = seen.last("kl_reference")
    return kl > max(0.5, 2 * before), {"kl": kl, "times": kl / (before or 1)}


def _verifier_timeouts(seen: Seen) -> Found:
    prompts = seen.grown("fate/timeout") / max(1.0, seen.grown("fate/trained"))
    share = max(prompts, seen.recent("status/timeout"))
    return share > 0.02, {"share": share, "limit": seen.setting("rollout", "verify_seconds")}


def _verifier_errors(seen: Seen) -> Found:
    share, prompts = max(0.0, seen.recent("status/error")), seen.grown("fate/failed")  # NaN is not above 0
    return share > 0.02 or prompts >= 2, {"share": share, "prompts": prompts}


def _unparsable(seen: Seen) -> Found:
    share = seen.recent("status/unparsable")
    return share > 0.5, {"share": share}


def _too_hard(seen: Seen) -> Found:
    same, right = seen.recent("groups/no_variance"), seen.recent("groups/all_correct")
    return same - right > 0.7, {"same": same, "right": right}


def _off_policy(seen: Seen) -> Found:
    control = seen.spec["kind"] == "control"
    effective = 1.0 if control else seen.recent("effective_samples")
    clipped = seen.recent("ppo/clip_fraction") if control else seen.recent("clipped_low") + seen.recent("clipped_high")
    return effective < 0.5 or clipped > 0.5, {"effective": effective, "clipped": clipped}


def _generators_lost(seen: Seen) -> Found:
    return seen.grown("fleet/lost") >= 2, {"lost": seen.grown("fleet/lost")}


def _endless(seen: Seen) -> Found:
    row = seen.rows[-1] if seen.rows else {}
    return row.get("episodes") == 0 and seen.progress > 0.1, {"frames": row.get("frame", NAN)}


def _no_progress(seen: Seen) -> Found:
    metric, command = LEARNED.get(seen.spec["kind"], ("loss", "plot"))
    first, last, noise = seen.quarters(metric)
    gain = first - last if metric == "loss" else last - first
    values = {"metric": metric, "first": first, "last": last, "noise": noise, "progress": seen.progress}
    fires = gain <= 2 * noise and seen.progress > 0.5 and not seen.recent("status/correct") > 0.9
    return fires, values | {"command": command}


def _trainer_waits(seen: Seen) -> Found:
    share = seen.seconds("rollout") / seen.seconds(*LOOP) if seen.elsewhere else NAN
    return share > 0.25, {"share": share, "staleness": seen.setting("rollout", "staleness")}


def _generators_wait(seen: Seen) -> Found:
    share = seen.seconds("rollout") / seen.seconds(*LOOP) if seen.elsewhere else NAN
    running, ready = seen.recent("rollout/running"), seen.recent("rollout/ready")
    return share < 0.02 and running < 0.1 * ready, {"share": share, "running": running, "ready": ready}


def _overhead(seen: Seen) -> Found:
    shares = {what: seen.seconds(*names) / seen.seconds(*SPANS) for what, names in ASIDE.items()}
    what = max(shares, key=lambda name: shares[name])
    return shares[what] > 1 / 3, {"what": what, "share": shares[what]}


def _blocked_loop(seen: Seen) -> Found:
    lag = seen.recent("time/loop_lag_mean", by=median)
    return lag > 0.5, {"lag": lag}


def _truncation(seen: Seen) -> Found:
    share = seen.recent("truncated")
    return share > 0.25, {"share": share, "limit": seen.setting("rollout", "max_new_tokens")}


def _stale(seen: Seen) -> Found:
    share = seen.grown("fate/stale") / max(1.0, seen.grown("fate/stale") + seen.grown("fate/trained"))
    return share > 0.1, {"share": share, "staleness": seen.setting("rollout", "staleness")}


def _solved(seen: Seen) -> Found:
    right = seen.recent("groups/all_correct")
    return right > 0.9 and seen.progress < 0.75, {"right": right, "progress": seen.progress}


def _lr_finished(seen: Seen) -> Found:
    rates = seen.all(seen.own("lr")) or [NAN]
    return rates[-1] < 1e-3 * max(rates) and seen.progress < 0.67, {"lr": rates[-1], "progress": seen.progress}


def _noisy_evaluation(seen: Seen) -> Found:
    returns, deviations = seen.all("eval/return"), seen.all("eval/return_std")
    if len(returns) < 5 or not deviations:
        return False, {}
    episodes = seen.setting("eval", "episodes")
    error, spread = median(deviations) / math.sqrt(episodes), max(returns) - min(returns)
    return error > 0.5 * spread > 0, {"error": error, "spread": spread, "episodes": episodes}


def _odd_seed(seen: Seen) -> Found:
    headline = next(iter(seen.status.get("progress", {}).get("headline", {})), "")
    last = {one.session.seed: median(rows[-5:]) for one in seen.trial if (rows := one.all(headline))}
    value, others = last.pop(seen.session.seed, NAN), list(last.values())
    if len(others) < 3:
        return False, {}
    middle = median(others)
    far = max(5 * 1.4826 * median(abs(one - middle) for one in others), abs(middle) / 3)
    return abs(value - middle) > far, {"metric": headline, "value": value, "others": middle}


CHECKS: dict[str, Callable[[Seen], Found]] = {name: globals()[f"_{name}"] for name in RULES}
"""The check of each rule."""
