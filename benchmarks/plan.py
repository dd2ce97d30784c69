"""What `palestra plan` predicts beside what is measured, and the study of large clusters in docs/scaling.md.

    palestra plan --calibrate                                    # once on this machine
    python benchmarks/plan.py predict > docs/plan_predicted.jsonl
    python benchmarks/plan.py measure > docs/plan_measured.jsonl  # a quarter of an hour of one core
    python benchmarks/plan.py table                              # both, side by side
    python benchmarks/plan.py study --plot docs/images/plan.svg  # 1.5B to 32B on 8 to 4,096 H200, by prediction alone

The specs of `predict` are none that the calibration runs. On a CPU that others use too, `measure` counts the seconds of
the processor, summed over the processes of a run: what they would take on one core of their own. On a GPU it counts
the clock's. Peaks are of the largest process, Python and torch included. One JSON line a spec.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from palestra.plan.calibrate import small_posttrain, small_pretrain
from palestra.plan.costs import Layout, train_step
from palestra.plan.devices import Device, Pool, parse_pool
from palestra.plan.job import Job, open_job
from palestra.plan.measure import measured
from palestra.plan.report import binds
from palestra.plan.search import Plan, Search
from palestra.spec.load import load
from palestra.spec.shape import MoESpec, Shape

DOCS = Path(__file__).parent.parent / "docs"


def shape(layers: int, width: int, mlp: int) -> dict[str, int]:
    return {"layers": layers, "width": width, "heads": max(2, width // 32), "mlp": mlp}


def rollout(group: int, new: int, **more: Any) -> dict[str, Any]:
    return {"rollout": {"group": group, "max_new_tokens": new, **more}}


SPECS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pretrain, 0.4M": (shape(4, 96, 256), {"train": {"steps": 10, "batch": 16}}),
    "pretrain, 13M, context 128": (shape(4, 512, 2048), {"train": {"steps": 6, "batch": 4}, "context": 128}),
    "pretrain, 8 layers, micro-batches": (
        shape(8, 128, 384),
        {"train": {"steps": 7, "batch": 24, "micro_tokens": 384}, "context": 48},
    ),
    "pretrain, Muon": (shape(4, 128, 384), {"train": {"steps": 8, "batch": 12}, "optim": {"name": "muon"}}),
    "pretrain, two trainers": (shape(4, 160, 480), {"train": {"steps": 8, "batch": 16}, "devices": 2}),
    "posttrain, 8 × 4 × 12": (shape(2, 128, 384), {"train": {"prompts_per_step": 8, "steps": 7}, **rollout(4, 12)}),
    "posttrain, 4 × 16 × 64": (shape(4, 96, 256), {"train": {"prompts_per_step": 4, "steps": 6}, **rollout(16, 64)}),
    "posttrain, recomputed anchor": (
        shape(3, 128, 384),
        {
            **{"train": {"prompts_per_step": 12, "steps": 7}, **rollout(8, 20)},
            "algorithm": {"preset": "grpo", "anchor": "recomputed"},
        },
    ),
    "posttrain, staleness 1": (
        shape(4, 128, 384),
        {"train": {"prompts_per_step": 8, "steps": 8}, **rollout(8, 32, staleness=1)},
    ),
    "posttrain, a generator apart": (
        shape(4, 128, 384),
        {"train": {"prompts_per_step": 8, "steps": 7}, **rollout(8, 32), "cluster": {"generators": 1}},
    ),
    "posttrain, two generators, staleness 2": (
        shape(2, 192, 512),
        {"train": {"prompts_per_step": 8, "steps": 9}, **rollout(8, 40, staleness=2), "cluster": {"generators": 2}},
    ),
    "posttrain, two trainers, a generator apart": (
        shape(3, 96, 256),
        {
            **{"train": {"prompts_per_step": 8, "steps": 7}, **rollout(8, 24)},
            "cluster": {"trainers": 2, "generators": 1},
        },
    ),
}
PROMPT = 8.0
"""Characters of a sum such as 123+456=."""


def spec_of(name: str, folder: Path) -> dict[str, Any]:
    sizes, changes = SPECS[name]
    make = small_posttrain if name.startswith("posttrain") else small_pretrain
    return make(folder, sizes, **changes)


def predict(pool: Pool) -> None:
    for name in SPECS:
        with tempfile.TemporaryDirectory() as folder:
            spec = load(spec_of(name, Path(folder))).spec
            known: dict[str, float | None] = {"prompt": PROMPT, "new": None, "spread": 0.0, "verify": 0.0}
            if spec.kind == "posttrain":  # no token ends a completion
                known["new"] = float(spec.model_dump()["rollout"]["max_new_tokens"])
            plan = Search(open_job(spec, known=known), pool).written()
        assert plan is not None
        row = {"spec": name, "step_s": plan.step, "peak_bytes": sum(plan.memory.values()), "rates": pool.device.source}
        print(json.dumps({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}))


def measure(device: Device, names: list[str]) -> None:
    for name in names or SPECS:
        with tempfile.TemporaryDirectory() as folder:
            run = measured(spec_of(name, Path(folder)), Path(folder))
        seconds = run.processor if device.cpu else run.wall
        row = {"spec": name, "step_s": round(seconds, 5), "wall_s": round(run.wall, 5), "peak_bytes": run.peak}
        print(json.dumps({**row, "machine": platform.machine()}), flush=True)


def table() -> None:
    predicted, found = (
        {row["spec"]: row for row in map(json.loads, (DOCS / f"plan_{name}.jsonl").read_text().splitlines())}
        for name in ("predicted", "measured")
    )
    print("| spec | step, predicted | measured | off by | peak, predicted | measured | off by |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in (name for name in predicted if name in found):
        a, b = predicted[name], found[name]
        cells = [f"{a['step_s']:.3f} s", f"{b['step_s']:.3f} s", f"{a['step_s'] / b['step_s'] - 1:+.0%}"]
        cells += [f"{row['peak_bytes'] / 1e6:.0f} MB" for row in (a, b)]
        print(f"| {name} | {' | '.join(cells)} | {a['peak_bytes'] / b['peak_bytes'] - 1:+.0%} |")


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
        job, first = study_job(model), None
        for count in counts:
            pool = parse_pool("8xH200", count // 8)
            try:
                plan = Search(job, pool).best()
            except Exception as error:
                print(json.dumps({"model": name, "devices": count, "fits": str(error)[:200]}), flush=True)
                continue
            rate = job.sampled / plan.step / count
            first = first or rate
            rows.append({"model": name, "devices": count, "efficiency": rate / first, **described(plan)})
            print(json.dumps(rows[-1]), flush=True)
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


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "plan"
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name in MODELS:
        mine = [row for row in rows if row["model"] == name]
        (line,) = axes.plot([r["devices"] for r in mine], [r["efficiency"] for r in mine], marker="o", label=name)
        before = None
        for row in mine:
            if row["binds"] != before:
                where = (row["devices"], row["efficiency"])
                axes.annotate(
                    row["binds"], where, xytext=(3, 5), textcoords="offset points", fontsize=7, color=line.get_color()
                )
            before = row["binds"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
    axes.set_xlabel("H200")
    axes.set_ylabel("tokens/s of a device, over those of the fewest")
    axes.set_ylim(0, 1.2)
    axes.legend(frameon=False)
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
    parser.add_argument("--device", default="cpu", help="as calibrated: cpu, or a GPU's name")
    parser.add_argument("--specs", nargs="*", default=[], choices=list(SPECS), metavar="SPEC")
    parser.add_argument("--counts", nargs="*", type=int, default=list(COUNTS))
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.what in ("predict", "measure"):
        pool = parse_pool(given.device)
        predict(pool) if given.what == "predict" else measure(pool.device, given.specs)
    elif given.what == "study":
        study(given.plot, given.counts)
    else:
        table() if given.what == "table" else peers()


if __name__ == "__main__":
    sys.exit(main())
