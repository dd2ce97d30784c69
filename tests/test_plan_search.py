"""Plans: costs that follow the counts, memory that fits, more devices never slower, the command and its errors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from palestra.cli.main import app
from palestra.errors import PalestraError, UsageError
from palestra.plan import calibrate
from palestra.plan.calibrate import fitted, fitted_apart
from palestra.plan.costs import Layout, sampling, scored_again, train_step, train_work, trainer_memory
from palestra.plan.devices import (
    PUBLISHED,
    Device,
    Pool,
    Work,
    calibration_file,
    find_device,
    parse_pool,
    read_price,
    store_calibration,
)
from palestra.plan.job import Job, open_job
from palestra.plan.measure import measured, small
from palestra.plan.report import binds
from palestra.plan.search import ROOM, Plan, Search, scaled
from palestra.spec.load import load
from palestra.spec.shape import MoESpec, Shape

SMOLLM = Shape(layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=8192, vocab=49152)
EIGHT = Shape(
    layers=36, width=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, context=8192, vocab=151936, tied=False
)
MOE = Shape(
    **{"layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "context": 8192, "vocab": 151936},
    moe=MoESpec(experts=128, active=8, mlp=768),
)


def posttrain(shape: Shape, folder: Path, **changes) -> Job:
    spec = {
        "kind": "posttrain",
        "name": "x",
        "model": {"init": "-"},
        "tasks": {"train": [{"task": "arithmetic"}]},
        "rollout": {"group": 8, "max_new_tokens": 512, **changes.pop("rollout", {})},
        "algorithm": {"preset": "grpo"},
        "train": {"steps": 100, "prompts_per_step": 64, **changes.pop("train", {})},
        **changes,
    }
    file = folder / "shape.yaml"
    file.write_text(shape.model_dump_json(exclude_none=True))
    return open_job(load(spec).spec, str(file))


def pretrain(shape: Shape, **train) -> Job:
    spec = {
        "kind": "pretrain",
        "name": "x",
        "model": {"shape": shape.model_dump(exclude_none=True), "tokenizer": "characters"},
        "data": {"train": {"t": {"path": "-"}}, "context": 1024},
        "train": {"steps": 100, "batch": 64, **train},
    }
    return open_job(load(spec).spec)


# Rows of docs/log.md and docs/performance.md, one H200: parameters of the shape, rows, tokens/s.
QWEN05 = Shape(layers=24, width=896, heads=14, kv_heads=2, mlp=4864, context=8192, vocab=151936)
QWEN06 = Shape(layers=28, width=1024, heads=16, kv_heads=8, head_dim=128, mlp=3072, context=8192, vocab=151936)


@pytest.mark.parametrize(
    ("shape", "rows", "rate"),
    [(SMOLLM, 1, 2113), (SMOLLM, 64, 71_000), (SMOLLM, 512, 224_000), (QWEN05, 512, 162_570), (QWEN06, 256, 69_408)],
)
def test_decoding_on_an_h200_is_what_was_measured(tmp_path, shape, rows, rate):
    job = replace(posttrain(shape, tmp_path), prompt=128.0, new=256.0)
    found = sampling(job, parse_pool("1xH200"), rows)
    assert found is not None
    assert rows / (found.base + rows * found.each) == pytest.approx(rate, rel=0.25)


def test_training_on_an_h200_is_what_was_measured():
    phase = train_step(pretrain(SMOLLM), Layout(), parse_pool("1xH200"))
    assert 64 * 1024 / phase.seconds == pytest.approx(364_000, rel=0.15)


def test_work_of_a_process_is_its_share(tmp_path):
    job = posttrain(EIGHT, tmp_path)
    whole, update = train_work(job, Layout(), cpu=False)
    for layout in (Layout(shard=8), Layout(data=2, tensor=4), Layout(context=4, pipeline=2)):
        part, _ = train_work(job, layout, cpu=False)
        assert part.flops == pytest.approx(whole.flops / 8)
    assert train_work(job, Layout(shard=8), cpu=False)[1].bytes == pytest.approx(update.bytes / 8)
    assert train_work(job, Layout(data=8), cpu=False)[1].bytes == pytest.approx(update.bytes)
    full, _ = train_work(job, Layout(checkpointing="full"), cpu=False)
    again = job.trained * scored_again(EIGHT)  # scores of the vocabulary
    assert full.flops - again == pytest.approx((whole.flops - again) * 5 / 4)  # the reference model's pass is one more


def test_prompt_is_trained_once_where_a_group_shares_much_of_it(tmp_path):
    long = replace(posttrain(SMOLLM, tmp_path), prompt=300.0, new=100.0)
    spared = 7 * 300 * 0.72  # attention and head see the prompt for each completion
    assert long.trained == pytest.approx(64 * (8 * 400 - spared))
    short = replace(long, prompt=10.0)
    assert short.trained == pytest.approx(64 * 8 * 110)


def test_experts_that_no_row_asks_for_are_not_read(tmp_path):
    job, pool = posttrain(MOE, tmp_path), parse_pool("1xH200")
    one, many = sampling(job, pool, 1), sampling(job, pool, 512)
    assert one is not None
    assert many is not None
    read = (one.base - MOE.layers * 14.8e-6) / pool.device.prices["decode"].bytes
    assert read == pytest.approx(2 * MOE.parameters(active=True), rel=0.05)
    assert many.base > 3 * one.base


@settings(deadline=None)
@given(
    st.sampled_from(["H200", "A100", "L40S"]),
    st.sampled_from([SMOLLM, EIGHT, MOE]),
    st.integers(0, 2),
    st.sampled_from([64, 2048]),
)
def test_twice_the_devices_are_never_slower_and_all_fits(tmp_path_factory, name, shape, staleness, new):
    rollout = {"staleness": staleness, "max_new_tokens": new}
    job = posttrain(shape, tmp_path_factory.mktemp("shape"), rollout=rollout, train={"prompts_per_step": 8})
    before = math.inf
    for each, nodes in ((2, 1), (4, 1), (8, 1)):
        pool = parse_pool(f"{each}x{name}", nodes)
        search = Search(job, pool)
        if not any(True for _ in search.plans(pool.count)):
            assert before == math.inf
            with pytest.raises(UsageError, match="fits nowhere"):
                search.best()
            continue
        plan = search.best()
        assert plan.step <= before * (1 + 1e-9)
        assert plan.devices <= pool.count
        assert plan.layout.apart <= job.spec.examples
        assert sum(plan.memory.values()) <= ROOM * pool.device.memory
        assert plan.sample is not None
        assert plan.sample.needed <= pool.device.memory
        before = plan.step


def test_scaled_loop_keeps_rows_and_time(tmp_path):
    job = posttrain(SMOLLM, tmp_path, train={"prompts_per_step": 512}, rollout={"group": 16, "staleness": 1})
    plan = Search(job, parse_pool("8xH200", 4)).best()
    loop = plan.loop
    assert loop is not None
    small = scaled(loop)
    assert small.generators < loop.generators
    assert small.prompts * small.group / small.generators == loop.prompts * loop.group / loop.generators
    assert small.complete * small.prompts == pytest.approx(loop.complete * loop.prompts)


def test_slow_verifiers_bind_and_are_named(tmp_path):
    job = replace(posttrain(SMOLLM, tmp_path, rollout={"staleness": 2, "verifiers": 1}), verify=5.0)
    plan = Search(job, parse_pool("8xH200")).best()
    assert binds(plan)[0] == "verifiers"
    assert plan.step == pytest.approx(512 * 5.0, rel=0.1)


def test_cost_takes_fewer_device_hours_than_speed_does(tmp_path):
    search = Search(posttrain(SMOLLM, tmp_path, rollout={"staleness": 1}), parse_pool("8xH200"))
    fast, cheap = search.best("tokens/s"), search.best("cost")
    assert cheap.devices * cheap.step <= fast.devices * fast.step
    assert fast.step <= cheap.step


def test_fit_finds_the_prices_that_made_the_times():
    random = np.random.default_rng(0)
    true = Work(2e-11, 0.0, 3e-4, 1e-5, 2e-3)
    samples = []
    for _ in range(12):
        work = Work(*(random.uniform(0.1, 1, 5) * [1e10, 1e9, 50, 500, 4]).tolist())
        samples.append((work, sum(price * count for price, count in zip(true, work, strict=True))))
    found = fitted(samples)
    for work, seconds in samples:
        assert sum(price * count for price, count in zip(found, work, strict=True)) == pytest.approx(seconds, rel=1e-3)
    assert min(found) >= 0.0
    more = fitted([(work, seconds + 1.0) for work, seconds in samples], [1.0] * len(samples))
    assert more == pytest.approx(found, rel=1e-2, abs=1e-12)


def test_a_gpu_and_the_python_that_runs_ahead_of_it_have_prices_of_their_own():
    true, random = Work(1e-12, 2e-11, 2e-3, 1e-4, 1e-2), np.random.default_rng(0)
    device = replace(PUBLISHED["H200"], prices={"train": true, "update": true})
    works = [Work(*(random.uniform(0.1, 1, 5) * [2e11, 2e9, 50, 500, 4]).tolist()) for _ in range(24)]
    samples = [(work, device.seconds("train", work)) for work in works]
    parts = [device.parts("update", work) for work in works]  # added up, as everything else is
    assert [seconds for _, seconds in samples] == pytest.approx([max(p.flops + p.bytes, p.host) for p in parts])
    on_gpu = sum(p.flops + p.bytes > p.host for p in parts)
    assert 4 < on_gpu < 20  # or the samples say nothing
    found = replace(device, prices={"train": fitted_apart(samples)})
    assert [found.seconds("train", work) for work in works] == pytest.approx([s for _, s in samples], rel=0.03)
    assert fitted_apart([(Work(1e9), 1.0), (Work(2e9), 2.0)]).flops == pytest.approx(1e-9)  # Python never shows


@pytest.mark.slow
def test_gpu_calibration_runs_whole_with_tiny_shapes(monkeypatch):
    """On a CPU: that nothing in it fails, not that its prices say anything of a GPU."""
    tiny = {"layers": 1, "width": 32, "heads": 2, "mlp": 64}
    monkeypatch.setitem(calibrate.CASES, "cuda", [(layers, 64, 128, 96, 4, 16) for layers in (1, 2, 3)])
    monkeypatch.setitem(calibrate.RUNS, "cuda", (tiny, ((2, 8), (4, 8))))
    told: list[str] = []
    device = calibrate.calibrated(told.append, kind="cuda")
    assert [line.partition(":")[0] for line in told[3:5]] == ["pretraining", "16 completions of 8 tokens"]
    assert min(price for phase in device.prices.values() for price in phase) >= 0.0
    assert device.seconds("train", Work(1e9, 1e9, 2, 4, 1)) > 0.0


def test_calibration_is_read_back_and_a_broken_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="--calibrate first"):
        find_device("cpu")
    device = replace(PUBLISHED["H200"], name="cpu", source="measured", hop=0.5)
    store_calibration(device)
    assert find_device("CPU") == device
    calibration_file("cpu").write_text("{}")
    with pytest.raises(UsageError, match=r"is not a calibration .*remove it"):
        find_device("cpu")


def test_devices_and_prices_that_are_unknown_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"no figures of H2000\. Did you mean 'H200'\?"):
        parse_pool("8xH2000")
    with pytest.raises(UsageError, match="expected a number and a device"):
        parse_pool("8x")
    assert parse_pool("8xh200", 4).count == 32
    file = tmp_path / "prices.yaml"
    file.write_text("H100: 2.5\n")
    assert read_price(file, "H100") == 2.5
    with pytest.raises(UsageError, match=r"no price of H200, only of H100: add it"):
        read_price(file, "H200")
    file.write_text("- 1\n")
    with pytest.raises(UsageError, match="expected dollars an hour by device"):
        read_price(file, "H200")


def test_model_that_fits_nowhere_says_by_how_much(tmp_path):
    search = Search(posttrain(EIGHT, tmp_path), parse_pool("1xL4"))
    with pytest.raises(UsageError, match=r"fits nowhere on 1 × L4: .* needs \d+\.\d GB on each, \d+\.\d GB more than"):
        search.best()


def command(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def files(tmp_path):
    spec = {
        "kind": "posttrain",
        "name": "x",
        "model": {"init": "nowhere"},
        "tasks": {"train": [{"task": "arithmetic"}]},
        "algorithm": {"preset": "grpo"},
        "train": {"steps": 100},
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    (tmp_path / "shape.yaml").write_text(EIGHT.model_dump_json(exclude_none=True))
    (tmp_path / "prices.yaml").write_text("{H200: 3.5}")
    return tmp_path


def test_command_prints_a_plan_whose_overrides_the_spec_takes(files):
    spec, shape = str(files / "spec.yaml"), str(files / "shape.yaml")
    arguments = [spec, "--shape", shape, "--devices", "8xH200", "--price", str(files / "prices.yaml")]
    said = command(*arguments)
    assert said.exit_code == 0, said.output
    for words in ("8 × H200", "tokens/s", "hours to the end", "what binds:", "$", "palestra train", "assumed:"):
        assert words in said.output
    row = json.loads(command(*arguments, "--json").output)["best"]
    assert row["cost"] == pytest.approx(3.5 * row["devices"] * row["hours"])
    (files / "prices.yaml").write_text("{H200: 7.0}")
    dear = json.loads(command(*arguments, "--json").output)["best"]
    assert dear["cost"] == pytest.approx(2 * row["cost"])
    assert row["trainer_peak"] == sum(row["trainer_bytes"].values())
    overrides = {"parallel": row["parallel"], "cluster": {"trainers": row["trainers"], "generators": row["generators"]}}
    assert load(spec, overrides=overrides).spec.processes == row["trainers"]


def test_command_says_what_is_missing(files):
    spec = str(files / "spec.yaml")
    for arguments, words in (
        ([], "which spec?"),
        ([spec, "--goal", "cost"], "--price FILE"),
        ([spec, "--goal", "speed"], "expected one of"),
        ([spec, "--devices", "8xH200"], "--shape FILE"),
        (
            [spec, "--devices", "8xH200", "--shape", str(files / "shape.yaml"), "--new-tokens", "9999"],
            "at most rollout",
        ),
        ([spec, "--devices", "8xH200", "--shape", str(files / "prices.yaml")], "not the fields of `model.shape`"),
    ):
        said = command(*arguments)
        assert isinstance(said.exception, UsageError)
        assert words in str(said.exception)


def test_control_has_no_plan(tmp_path):
    with pytest.raises(UsageError, match="not for `control`"):
        open_job(load("examples/control/ppo_cartpole.yaml").spec)


def test_trainer_memory_is_that_of_check():
    from palestra.spec.memory import predicted

    job = pretrain(SMOLLM)
    plan = Search(job, Pool(PUBLISHED["H200"], 1, 1)).written()
    assert plan is not None
    rows = {name: count for name, count in plan.memory.items() if name != "process"}
    assert rows == predicted(job.spec, SMOLLM, "cuda")


def test_memory_of_a_trainer_follows_the_closed_forms(tmp_path):
    job = posttrain(EIGHT, tmp_path, rollout={"max_prompt_tokens": 100})
    count, pool = EIGHT.parameters(), parse_pool("8xH200")
    for layout in (Layout(), Layout(shard=8), Layout(data=2, shard=4)):
        held = trainer_memory(job, layout, pool, generates=True)
        apart = layout.processes / layout.data  # copies are whole, shards are shares
        assert held["weights"] == pytest.approx(4 * count / apart, rel=1e-6)
        assert held["optimizer state"] == pytest.approx(8 * count / apart, rel=1e-6)
    # 64 × 8 rows of 100 + 512 tokens in whole pages of 32, keys and values of 36 layers × 8 heads × 128 in bf16
    assert held["KV cache"] == pytest.approx(512 * 640 * 2 * 36 * 8 * 128 * 2)
    assert "KV cache" not in trainer_memory(job, Layout(), pool, generates=False)


@given(st.sampled_from([SMOLLM, EIGHT, MOE]), st.sampled_from(["L4", "A100", "H200"]), st.integers(0, 3))
def test_what_fits_few_devices_fits_more(tmp_path_factory, shape, name, power):
    job = posttrain(shape, tmp_path_factory.mktemp("shape"), train={"prompts_per_step": 8})
    fits = [any(True for _ in Search(job, parse_pool(f"{n}x{name}")).plans(n)) for n in (2**power, 2 ** (power + 1))]
    assert fits[1] >= fits[0]


def test_failures_cost_hours_as_often_as_they_come(tmp_path):
    jobs = [replace(posttrain(SMOLLM, tmp_path, rollout={"staleness": 1}), mtbf=mtbf) for mtbf in (1e4, 1e3, 1e9)]
    often, more, never = (Search(job, parse_pool("8xH200")).best() for job in jobs)
    assert more.lost == pytest.approx(10 * often.lost)
    assert never.hours < often.hours < more.hours
    assert often.lost >= often.layout.processes / 3.6e7 * 200  # at least the most of a restart of the trainer
    assert never.step == often.step == more.step
    job = replace(pretrain(SMOLLM), mtbf=1e4)
    plan = Search(job, parse_pool("8xH200")).best()
    checkpoint = min(each.seconds for each in job.spec.every.checkpoint if each.is_time)
    assert plan.lost == pytest.approx(plan.layout.processes / 3.6e7 * (300 + checkpoint / 2))


def test_a_run_to_measure_takes_what_it_is_told_to_take(tmp_path):
    spec, known = small(tmp_path, {"layers": 1, "width": 32, "heads": 2, "mlp": 64}, train={"prompts_per_step": 2})
    found = measured({**spec, "rollout": {**spec["rollout"], "group": 4}}, tmp_path)
    assert known["new"] == pytest.approx(found.length, rel=0.25)
    assert found.step > (found.spans["rollout"] + found.spans["train"]) / 2 > 0.0  # a mean, and medians
    assert 50e6 < found.peak < 2e9
    with pytest.raises(PalestraError, match=r"a run to measure ended with 1 after 0 steps: .*no_such"):
        measured({**spec, "no_such": 1}, tmp_path / "bad")


def test_cpu_calibration_predicts_the_written_spec_on_shared_cores(tmp_path):
    device: Device = replace(PUBLISHED["H200"], name="cpu")
    job = posttrain(SMOLLM, tmp_path, cluster={"generators": 2}, train={"precision": "fp32"})
    one, three = (Search(job, Pool(device, count, 1)).written() for count in (1, 3))
    assert one is not None
    assert three is not None
    assert one.loop is not None
    assert three.loop is not None
    assert one.loop.together
    assert not three.loop.together
    assert one.step > three.step


def test_processes_of_one_machine_slow_each_other_unless_they_take_turns(tmp_path):
    device = replace(PUBLISHED["H200"], name="cpu", crowd=0.5, base=1e9, sampling=1e8, joined=1e7)

    def written(**changes) -> Plan:
        plan = Search(posttrain(SMOLLM, tmp_path, **changes), Pool(device, 4, 1)).written()
        assert plan is not None
        assert plan.loop is not None
        return plan

    stale = {"rollout": {"staleness": 1}}
    one, turns, apart = written(), written(cluster={"generators": 1}), written(cluster={"generators": 1}, **stale)
    two = written(cluster={"trainers": 2, "generators": 1})
    assert one.trained_in == turns.trained_in == one.train.seconds
    assert apart.trained_in == pytest.approx(1.5 * one.train.seconds)
    assert two.trained_in == pytest.approx(1.5 * two.train.seconds)
    assert apart.loop.each == pytest.approx(1.5 * turns.loop.each)
    assert one.memory["process"] == 1.1e9
    assert two.memory["process"] == 1.11e9
    assert trainer_memory(pretrain(SMOLLM), Layout(), Pool(device, 1, 1), generates=False)["process"] == 1e9
