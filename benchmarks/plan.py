"""What `palestra plan` predicts beside what is measured, and the study of large clusters in docs/scaling.md.

    palestra plan --calibrate                                     # once on this machine, with nothing else on it
    python benchmarks/plan.py predict > docs/plan_predicted.jsonl
    python benchmarks/plan.py measure > docs/plan_measured.jsonl  # or a few: --specs "sft, 1M" "pretrain, Muon"
    python benchmarks/plan.py table                               # both, side by side
    python benchmarks/plan.py predict --gpu > docs/plan_gpu_predicted.jsonl   # for an H200 that was calibrated
    python benchmarks/plan.py measure --gpu > docs/plan_gpu_measured.jsonl    # three minutes, on that
    python benchmarks/plan.py table --gpu
    python benchmarks/plan.py study --plot docs/images/plan.svg   # 1.5B to 32B on 8 to 4,096 H200, by prediction alone
    python benchmarks/plan.py peers                               # what others publish

The specs of `predict` are none that the calibration runs. Seconds are of the clock, medians over the steps after the
second. Peaks are of the trainer's first process: resident, Python and torch included; on a GPU what torch has
allocated. One JSON line a spec.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from palestra.errors import UsageError
from palestra.plan.costs import Layout, train_step
from palestra.plan.devices import Pool, parse_pool
from palestra.plan.job import Job, open_job
from palestra.plan.measure import measured, small
from palestra.plan.report import binds
from palestra.plan.search import Plan, Search
from palestra.spec.load import load
from palestra.spec.shape import MoESpec, Shape

DOCS = Path(__file__).parent.parent / "docs"
CHATML = 21
"""Tokens around question and answer of a conversation."""


def sizes(layers: int, width: int, mlp: int, **more: Any) -> dict[str, Any]:
    return {"shape": {"layers": layers, "width": width, "heads": max(2, width // 32), "mlp": mlp, **more}}


def trained(kind: str, batch: int, context: int, steps: int = 10, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "context": context, "train": {"batch": batch, "steps": steps, **more}}


def sampled(prompts: int, group: int, new: int, steps: int = 12, staleness: int = 0) -> dict[str, Any]:
    rollout = {"group": group, "max_new_tokens": new, "staleness": staleness}
    return {"train": {"prompts_per_step": prompts, "steps": steps}, "rollout": rollout}


ANCHOR = {"algorithm": {"preset": "grpo", "anchor": "recomputed"}}
"""Beside the gradients, a pass of the model as it was and one of the reference model."""
SPECS: dict[str, dict[str, Any]] = {
    "pretrain, 1.2M": {**sizes(6, 128, 368), **trained("pretrain", 14, 72)},
    "pretrain, 14M": {**sizes(4, 544, 1920), **trained("pretrain", 3, 144, 8)},
    "pretrain, micro-batches": {**sizes(5, 192, 592), **trained("pretrain", 18, 60, 10, micro_tokens=420)},
    "pretrain, Muon": {**sizes(4, 192, 544), **trained("pretrain", 8, 88), "optim": {"name": "muon"}},
    "pretrain, two trainers": {**sizes(4, 224, 608), **trained("pretrain", 12, 80), "devices": 2},
    "sft, 2M": {**sizes(5, 160, 512), **trained("sft", 12, 104)},
    "posttrain, 14 × 4 × 18": {**sizes(4, 96, 272), **sampled(14, 4, 18)},
    "posttrain, 4 × 14 × 72": {**sizes(3, 128, 416), **sampled(4, 14, 72)},
    "posttrain, 12M": {**sizes(4, 448, 1728), **sampled(4, 4, 48, 9)},
    "posttrain, reference and anchor": {**sizes(3, 160, 448), **sampled(8, 8, 26), **ANCHOR},
    "posttrain, staleness 1": {**sizes(4, 96, 320), **sampled(8, 8, 44, 12, 1)},
    "posttrain, a generator apart": {**sizes(4, 160, 384), **sampled(6, 8, 40), "cluster": {"generators": 1}},
    "posttrain, a generator apart, staleness 1": {
        **sizes(3, 192, 448),
        **sampled(7, 8, 48, 14, 1),
        "cluster": {"generators": 1},
    },
    "posttrain, two generators apart, staleness 2": {
        **sizes(3, 160, 480),
        **sampled(10, 8, 36, 14, 2),
        "cluster": {"generators": 2},
    },
    "posttrain, two trainers, a generator apart": {
        **sizes(2, 256, 640),
        **sampled(8, 8, 34),
        "cluster": {"trainers": 2, "generators": 1},
    },
    "posttrain, two trainers, two generators apart": {
        **sizes(2, 224, 640),
        **sampled(9, 8, 40),
        "cluster": {"trainers": 2, "generators": 2},
    },
}
LETTERS = {"characters": 20_000}
"""So large a vocabulary that completions hardly ever end before their limit."""
GPU_SPECS: dict[str, dict[str, Any]] = {
    "pretrain, 60M": {**sizes(16, 512, 1920, heads=8, context=640), **trained("pretrain", 20, 640), **LETTERS},
    "pretrain, 600M": {**sizes(20, 1536, 4224, heads=24, context=1024), **trained("pretrain", 10, 1024), **LETTERS},
    "sft, 170M, two micro-batches": {**sizes(18, 832, 2304, heads=13, context=576), **trained("sft", 40, 576)},
    "posttrain, 30M, 64 × 4 × 64": {**sizes(9, 448, 1344, heads=7), **sampled(64, 4, 64), **LETTERS},
    "posttrain, 100M, 16 × 16 × 200": {**sizes(13, 704, 2048, heads=11), **sampled(16, 16, 200), **LETTERS},
    "posttrain, 330M, 20 × 8 × 256": {**sizes(22, 1024, 3072, heads=16), **sampled(20, 8, 256), **LETTERS},
    "posttrain, 70M, reference and anchor": {
        **{**sizes(10, 640, 2048, heads=10), **sampled(40, 8, 96), **ANCHOR, **LETTERS},
    },
    "posttrain, 110M, staleness 1": {**sizes(14, 704, 2048, heads=11), **sampled(28, 8, 176, 14, 1), **LETTERS},
}


def prepared(folder: Path, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float | None]]:
    """A spec whose files are in the folder; conversations of which no two are alike: what is alike is computed once."""
    if given.get("kind") != "sft":
        return small(folder, **given)
    spec, known = small(folder, **given | {"kind": "pretrain"})
    random, file = Random(0), folder / "chat.jsonl"
    turns = {"user": 20, "assistant": given["context"] - 20 - CHATML}
    letters = [chr(code) for code in range(32, 123)]
    with file.open("w") as out:
        for _ in range(400):
            said = {role: "".join(random.choices(letters, k=size)) for role, size in turns.items()}
            out.write(json.dumps({"messages": [{"role": role, "content": said[role]} for role in turns]}) + "\n")
    return spec | {"kind": "sft", "data": spec["data"] | {"train": {"texts": {"path": str(file)}}}}, known


def predict(names: Iterable[str], specs: dict[str, dict[str, Any]], pool: Pool) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            spec, known = prepared(Path(folder), specs[name])
            plan = Search(open_job(load(spec).spec, known=known), pool).written()
        assert plan is not None
        # On a GPU the process itself is not in what torch has allocated.
        peak = sum(count for row, count in plan.memory.items() if pool.device.cpu or row != "process")
        row = {"spec": name, "step_s": round(plan.step, 4), "peak_bytes": round(peak)}
        print(json.dumps({**row, "rates": pool.device.source}, ensure_ascii=False), flush=True)


def measure(names: Iterable[str], specs: dict[str, dict[str, Any]]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            spec, _ = prepared(Path(folder), specs[name])
            run = measured(spec, Path(folder))
        spans = {key: round(run.spans[key], 4) for key in ("rollout", "train", "publish") if key in run.spans}
        row = {"spec": name, "step_s": round(run.step, 4), "peak_bytes": round(run.peak), "spans": spans}
        print(json.dumps({**row, "machine": platform.machine()}, ensure_ascii=False), flush=True)


def table(files: list[Path]) -> None:
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    predicted, found = ({row["spec"]: row for row in rows if key in row} for key in ("rates", "machine"))
    print("| spec | step, predicted | measured | off by | peak, predicted | measured | off by |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    close = []
    for name in (name for name in predicted if name in found):
        a, b = predicted[name], found[name]
        step, peak = (a[key] / b[key] - 1 for key in ("step_s", "peak_bytes"))
        cells = [f"{row['step_s']:.3f} s" for row in (a, b)] + [f"{step:+.0%}"]
        cells += [f"{row['peak_bytes'] / 1e6:.0f} MB" for row in (a, b)] + [f"{peak:+.0%}"]
        print(f"| {name} | {' | '.join(cells)} |")
        close.append((abs(step) <= 0.2, abs(peak) <= 0.1))
    steps, peaks, both = sum(a for a, _ in close), sum(b for _, b in close), sum(a and b for a, b in close)
    print(f"\nsteps within 20 %: {steps}; peaks within 10 %: {peaks}; both: {both} of {len(close)}")


# ---- the study

QWEN = {"context": 40960, "vocab": 151936, "rope_theta": 1e6}
MODELS = {
    "1.5B": Shape(layers=28, width=1536, heads=12, kv_heads=2, mlp=8960, tied=True, attention_bias=True, **QWEN),
    "8B": Shape(layers=36, width=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, tied=False, **QWEN),
    "32B": Shape(layers=64, width=5120, heads=64, kv_heads=8, head_dim=128, mlp=25600, tied=False, **QWEN),
    "30B-A3B": Shape(
        **{"layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "tied": False},
        moe=MoESpec(experts=128, active=8, mlp=768),
        **QWEN,
    ),
}
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def study_job(model: Shape, *, prompts: int = 512, group: int = 16, new: int = 16384, staleness: int = 4) -> Job:
    """Long reasoning: 512 prompts × 16 of at most 16,384 tokens, 6,000 in the mean."""
    spec = {
        "kind": "posttrain",
        "name": "study",
        "model": {"init": "-"},
        "tasks": {"train": [{"task": "arithmetic"}]},
        "rollout": {"group": group, "max_new_tokens": new, "staleness": staleness},
        "algorithm": {"preset": "grpo"},
        "train": {"steps": 1000, "prompts_per_step": prompts},
        "every": {"eval": None},
    }
    known = {"prompt": 200.0, "new": 6000.0 * new / 16384, "spread": 0.7, "verify": 0.02}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shape.yaml"
        file.write_text(model.model_dump_json(exclude_none=True))
        return open_job(load(spec).spec, str(file), known=known)


def study(plot: Path | None, counts: list[int]) -> None:
    rows = []
    for name, model in MODELS.items():
        job, mine = study_job(model), []
        for count in counts:
            pool = parse_pool("8xH200", count // 8)
            try:
                plan = Search(job, pool).best()
            except UsageError as error:
                print(json.dumps({"model": name, "devices": count, "fits": str(error)[:200]}), flush=True)
                continue
            mine.append({"model": name, "devices": count, **described(plan)})
        best = max(row["tokens_per_s"] / row["devices"] for row in mine)
        mine = [{**row, "efficiency": round(row["tokens_per_s"] / row["devices"] / best, 3)} for row in mine]
        print("\n".join(map(json.dumps, mine)), flush=True)
        rows += mine
    if plot is not None:
        draw(rows, plot)


def described(plan: Plan) -> dict[str, Any]:
    word, _ = binds(plan)
    return {
        "trainers": plan.layout.processes,
        "parallel": plan.layout.axes,
        "generators": plan.generators,
        "each": plan.tensor,
        "step_s": round(plan.step, 2),
        "tokens_per_s": round(plan.job.sampled / plan.step),
        "hours_1000_steps": round(plan.hours, 1),
        "lost": round(plan.lost, 4),
        "binds": word,
    }


def _points(rows: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [row["devices"] for row in rows], [row["efficiency"] for row in rows]


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "plan"
    figure, axes = plt.subplots(figsize=(8, 4.8))
    for name in MODELS:
        mine = [row for row in rows if row["model"] == name]
        turns = [
            row
            for before, row in zip([None, *mine], mine, strict=False)
            if not before or before["binds"] != row["binds"]
        ]
        words = [row["binds"] if row is turns[0] else f"{row['binds']} from {row['devices']:,}" for row in turns]
        (line,) = axes.plot(*_points(mine), marker="o", markersize=4, label=f"{name}: {', '.join(words)}")
        axes.plot(
            *_points(turns[1:]), "o", markersize=10, fillstyle="none", color=line.get_color()
        )  # another one binds
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
    axes.set_xlabel("H200")
    axes.set_ylabel("tokens/s of a device\n(1: on as many as are best for the model)")
    axes.set_ylim(0, 1.1)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), title="what binds, and from where on")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def peers() -> None:
    """Figures that others publish, beside the same by prediction."""
    h800 = {count: parse_pool("8xH800", count // 8) for count in (8, 128)}
    for staleness in (0, 4):
        plan = Search(study_job(MODELS["1.5B"], new=8192, staleness=staleness), h800[128]).best("wall")
        print(
            json.dumps(
                {"peer": "AReaL, 1.5B, 128 H800, 1,000 steps", "staleness": staleness, "hours": round(plan.hours, 1)}
            )
        )
    small = Shape(layers=28, width=1024, heads=16, kv_heads=8, head_dim=128, mlp=3072, tied=True, **QWEN)
    for tokens in (16384, 65536):
        spec = {
            **{"kind": "pretrain", "name": "x", "train": {"steps": 10, "batch": 1, "micro_tokens": tokens}},
            "model": {"shape": small.model_dump(exclude_none=True) | {"context": tokens}, "tokenizer": "characters"},
            "data": {"train": {"t": {"path": "-"}}, "context": tokens},
        }
        job = open_job(load(spec).spec)
        phase = train_step(job, Layout(micro=tokens, checkpointing="full"), parse_pool("1xH100"))
        row = {
            "peer": f"prime-rl, Qwen3-0.6B, {tokens} tokens, H100, recomputed",
            "tokens_per_s": round(tokens / phase.seconds),
        }
        print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "table", "study", "peers"])
    parser.add_argument("--gpu", action="store_true", help="the specs for a GPU, which are too large for two cores")
    parser.add_argument("--devices", help="as calibrated: 2xcpu, or a GPU's name (H200)")
    parser.add_argument("--specs", nargs="*", choices=[*SPECS, *GPU_SPECS], metavar="SPEC")
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS))
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    specs = GPU_SPECS if given.gpu else SPECS
    match given.what:
        case "predict":
            predict(given.specs or specs, specs, parse_pool(given.devices or ("H200" if given.gpu else "2xcpu")))
        case "measure":
            measure(given.specs or specs, specs)
        case "study":
            study(given.plot, given.counts)
        case "table":
            name = "plan_gpu_{}.jsonl" if given.gpu else "plan_{}.jsonl"
            table([DOCS / name.format(which) for which in ("predicted", "measured")])
        case "peers":
            peers()


if __name__ == "__main__":
    sys.exit(main())
