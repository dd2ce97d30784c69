"""Draws the learning curves of docs/algorithms/: every preset from one model, and control specs without benchmark rows.

    python docs/curves.py [presets] [td3] [off_policy] [--steps 24] [--seeds 1] [--folder .bench/curves]

`presets` trains the quickstart's model on sums with each preset and draws `eval/accuracy`, a panel each. Runs that
are in the folder already are drawn as they are, so that an interrupted call continues. The other control algorithms
have the plots of `palestra bench --table`.
"""

import argparse
import shutil
import sys
from pathlib import Path
from statistics import fmean

import palestra
from palestra.errors import UsageError
from palestra.runs.plot import new_figure
from palestra.runs.run import Run
from palestra.spec.algorithm import PRESETS

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
IMAGES = ROOT / "docs" / "images"
COLUMNS = 4


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="presets, td3, off_policy; by default all")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".bench/curves"))
    given = parser.parse_args()
    drawn = {"presets": presets, "td3": td3, "off_policy": off_policy}
    for name in given.which or drawn:
        print(drawn[name](given))


if __name__ == "__main__":
    main()
