"""Draws learning curves: every preset from one model, TD3, off-policy parts, agents, images, and the examples' games.

    python docs/curves.py [presets] [td3] [off_policy] [agents] [vision] [games] [gsm8k] [--folder DIR]

`presets` trains the quickstart's model on sums with each preset and draws `eval/accuracy`, a panel each; `agents`
trains the search agent and the tool user with seeds 100 to 102, and with shuffled rewards, `vision` the model that
counts shapes. Runs that are in the folder already are drawn as they are, so that an interrupted call continues. The
other control algorithms have the plots of `palestra bench --table`. `games` and `gsm8k` draw runs that
docs/environments.md and docs/posttrain.md say how to make.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import palestra
from palestra.errors import UsageError
from palestra.runs.plot import new_figure
from palestra.runs.run import Run
from palestra.spec.algorithm import PRESETS

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
IMAGES = ROOT / "docs" / "images"
COLUMNS = 4
GAMES = (
    ("guess", "eval/pass@1", "guess a number, sampled"),
    ("tictactoe", "eval/accuracy", "tic-tac-toe against random moves, greedy"),
)
"""Name of the runs, metric, title."""
SEEDS = (100, 101, 102)


def trained(spec: Path, name: str, given: argparse.Namespace, *overrides: str) -> Run:
    """The finished run of this name in the folder; made now if there is none."""
    try:
        run = palestra.open_run(name, given.folder / "runs")
        if run.state == "done":
            return run
    except UsageError:
        pass  # not there yet
    shared = [f"name={name}", "threads=1", f"max_session={given.seeds}"]
    return palestra.run(str(spec), overrides=[*shared, *overrides], root=given.folder / "runs", quiet=True)


def presets(given: argparse.Namespace) -> Path:
    """Held-out accuracy over steps: a panel for each preset, the others in gray."""
    sys.path.insert(0, str(QUICKSTART))
    from teacher import write_lessons

    lessons = given.folder / "lessons.jsonl"
    write_lessons(lessons)
    start = trained(
        QUICKSTART / "sft.yaml",
        "start",
        given,
        f"data.train.lessons.path={lessons}",
        "train.steps=300",
        "max_session=1",
    )
    curves = {}
    for preset in PRESETS:
        critic = ", critic: {lr: 3e-4}" if preset == "ppo" else ""
        settings = (
            f"algorithm={{preset: {preset}{critic}}}",
            "eval={problems: 200}",
            "every={eval: 4 steps}",
            "train.prompts_per_step=32",
            "optim.lr={shape: linear, start: 5e-4, end: 0}",
        )
        run = trained(
            QUICKSTART / "grpo.yaml", preset, given, f"model.init={start.path}", f"train.steps={given.steps}", *settings
        )
        rows = [row for row in run.metrics() if "eval/accuracy" in row]
        steps = sorted({row["step"] for row in rows})
        curves[preset] = (steps, [fmean(row["eval/accuracy"] for row in rows if row["step"] == step) for step in steps])
        print(preset, f"{curves[preset][1][0]:.3f} → {curves[preset][1][-1]:.3f}", flush=True)
    figure = new_figure(9.6, 7.2)
    panels = figure.subplots(-(-len(curves) // COLUMNS), COLUMNS, sharex=True, sharey=True)
    for panel in panels.flat[len(curves) :]:
        panel.set_axis_off()
    for panel in panels.flat[len(curves) - COLUMNS : len(curves)]:
        panel.tick_params(labelbottom=True)
    for panel, (preset, curve) in zip(panels.flat, curves.items(), strict=False):
        for other in curves.values():
            panel.plot(*other, color="0.85", linewidth=0.8)
        panel.plot(*curve, color="tab:blue", linewidth=2)
        panel.set_title(preset, fontsize=10)
    figure.supxlabel("step")
    figure.supylabel("held-out accuracy, greedy")
    path = IMAGES / "presets.png"
    figure.savefig(path, dpi=120)
    return path


def td3(given: argparse.Namespace) -> Path:
    """The curve of the shipped spec with fewer frames, as `palestra plot` draws it."""
    run = trained(
        ROOT / "examples" / "control" / "td3_pendulum.yaml", "td3_pendulum", given, "seed=100", "train.frames=2e4"
    )
    return Path(shutil.copy(run.path / "plots" / "learning_curve.png", IMAGES / "td3_pendulum.png"))


def games(given: argparse.Namespace) -> Path:
    """Held-out games won over steps, a line for each seed; in gray the controls with shuffled rewards."""
    figure = new_figure(9.6, 3.6)
    for panel, (game, metric, title) in zip(figure.subplots(1, 2), GAMES, strict=True):
        for name, color in ((f"{game}_control", "0.7"), (game, "tab:blue")):
            folders = sorted((given.folder / "runs" / name).glob("[0-9]*"))
            if not folders:
                raise UsageError(f"there is no run {name} in {given.folder}/runs: see docs/environments.md")
            for folder in folders:
                rows = [row for row in Run(folder).metrics() if metric in row]
                panel.plot([row["step"] for row in rows], [row[metric] for row in rows], color=color, marker="o")
        panel.set(title=title, xlabel="step", ylabel="games won", ylim=(0, 1))
    path = IMAGES / "games.png"
    figure.savefig(path, dpi=120)
    return path


def controlled(panel: Any, spec: Path, name: str, start: Callable[[int], Run], given: argparse.Namespace) -> None:
    """Held-out accuracy over steps of each seed, and in gray with shuffled rewards, from the model of a start."""
    for kind, color, label in (("control", "0.6", "shuffled rewards"), ("rewards", "tab:blue", "rewards")):
        control = ["control=shuffled_rewards"] if kind == "control" else []
        for seed in SEEDS:
            settings = (f"model.init={start(seed).path}", f"seed={seed}", *control)
            run = trained(spec, f"{name}_{kind}_{seed}", given, *settings)
            rows = [row for row in run.metrics(seed) if "eval/accuracy" in row]
            curve = [row["eval/accuracy"] for row in rows]
            rewards = [row["reward"] for row in run.metrics(seed) if "reward" in row]
            ends = f"sampled {fmean(rewards[:10]):.2f} → {fmean(rewards[-10:]):.2f}"
            print(name, kind, seed, *(f"{value:.3f}" for value in curve), ends, flush=True)
            mark = {"color": color, "marker": "o", "markersize": 3, "label": label if seed == SEEDS[0] else None}
            panel.plot([row["step"] for row in rows], curve, **mark)
    panel.set_title(str(spec.relative_to(ROOT)), fontsize=10)
    panel.set(xlabel="step", ylim=(0, 1.02))
    panel.legend(frameon=False)


def agents(given: argparse.Namespace) -> Path:
    """Held-out accuracy of the search agent and of the tool user over steps, with controls that must not learn."""
    sys.path.insert(0, str(ROOT))  # where the agents are imported from
    figure = new_figure(9.6, 3.4)
    for panel, name in zip(figure.subplots(1, 2, sharey=True), ("search", "tools"), strict=True):
        folder, lessons = ROOT / "examples" / "agents" / name, given.folder / f"{name}.jsonl"
        import_module(f"examples.agents.{name}.lessons").write_lessons(lessons)
        data = f"data.train.lessons.path={lessons}"
        start = trained(folder / "sft.yaml", f"{name}_start", given, data, "seed=1000")
        controlled(panel, folder / "rl.yaml", name, lambda _, start=start: start, given)
    figure.supylabel("held-out accuracy, greedy", fontsize=10)
    path = IMAGES / "agents.png"
    figure.savefig(path, dpi=120)
    return path


def vision(given: argparse.Namespace) -> Path:
    """Held-out accuracy in counting shapes over steps; every seed has a start of its own."""
    sys.path.insert(0, str(ROOT))
    folder, lessons = ROOT / "examples" / "vision", given.folder / "shapes.jsonl"
    import_module("examples.vision.lessons").write_lessons(lessons)

    def start(seed: int) -> Run:
        settings = (f"data.train.lessons.path={lessons}", "train.steps=34", f"seed={seed}")
        return trained(folder / "sft.yaml", f"shapes_start_{seed}", given, *settings)

    figure = new_figure(6.0, 3.4)
    controlled(figure.subplots(), folder / "grpo.yaml", "shapes", start, given)
    figure.supylabel("held-out accuracy, greedy", fontsize=10)
    path = IMAGES / "vision.png"
    figure.savefig(path, dpi=120)
    return path


def off_policy(given: argparse.Namespace) -> Path:
    """Held-out return of hindsight and of memory: the shipped specs, a line for each seed from 100 on."""
    names = ["her_bitflip", "her_fetch_reach", "r2d2_tmaze"]
    figure = new_figure(9.6, 3.0)
    for panel, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for seed in range(100, 100 + given.seeds):
            spec = ROOT / "examples" / "control" / f"{name}.yaml"
            run = trained(spec, f"{name}_{seed}", given, f"seed={seed}", "max_session=1")
            rows = [row for row in run.metrics() if "eval/return" in row]
            panel.plot([row["frame"] for row in rows], [row["eval/return"] for row in rows], marker=".", label=seed)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("frames")
    figure.supylabel("return of the best actions", fontsize=10)
    path = IMAGES / "off_policy.png"
    figure.savefig(path, dpi=120)
    return path


def gsm8k(given: argparse.Namespace) -> Path:
    """A run on a GPU that is in the folder: accuracy, what tells how the policy changes, and the time of a step."""
    found = list(palestra.open_run("gsm8k_100", given.folder / "runs").metrics(100))
    rows, evaluated = ([row for row in found if key in row] for key in ("reward", "eval/accuracy"))
    figure = new_figure(9.6, 3.0)
    left, middle, right = figure.subplots(1, 3)
    steps = [row["step"] for row in rows]
    left.plot(steps, [row["reward"] for row in rows], color="0.7", label="training problems, sampled")
    accuracy = [row["eval/accuracy"] for row in evaluated]
    left.plot([row["step"] for row in evaluated], accuracy, marker="o", label="500 held out, greedy")
    left.set(ylim=(0, 0.8), title="accuracy")
    middle.plot(steps, [row["entropy"] for row in rows], label="entropy of a token")
    fresh = [row for row in rows if row.get("mismatch") is not None]
    middle.plot([row["step"] for row in fresh], [row["mismatch"] for row in fresh], label="mismatch (k3)")
    middle.set(yscale="log", title="policy")
    parts = {name: [row[f"time/{name}"] for row in rows] for name in ("train", "rollout", "publish")}
    right.stackplot(steps, *parts.values(), labels=list(parts))
    right.set(ylim=(0, 4), title="seconds of a step")
    for panel in (left, middle, right):
        panel.set_xlabel("step")
        panel.legend(frameon=panel is right, fontsize=8)
    path = IMAGES / "gsm8k.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    functions = (presets, td3, off_policy, agents, vision, games, gsm8k)
    drawn = {function.__name__: function for function in functions}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help=f"{', '.join(drawn)}; by default all but games and gsm8k")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".bench/curves"))
    given = parser.parse_args()
    for name in given.which or list(drawn)[:-2]:
        print(drawn[name](given))


if __name__ == "__main__":
    main()
