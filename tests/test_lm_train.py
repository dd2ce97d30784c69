"""Training end to end: gradients that depend on the batch alone, checkpoints others load, runs that build on runs."""

import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_lm import EXPERTS, MUON, Lab, rows_of, session_of
from torch import Tensor, nn

import palestra
from palestra.data.chat import end_of_turn
from palestra.data.mixture import Mixture
from palestra.data.store import Example
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.kinds.lm import objective_of
from palestra.kinds.models import build_model, open_model, start_of
from palestra.lm.batch import Batch, forward
from palestra.lm.datasets import text_data
from palestra.lm.engine import LossFunction, TrainEngine
from palestra.lm.head import logits
from palestra.lm.hf import load_pretrained
from palestra.lm.model import Transformer
from palestra.lm.objectives import NextToken, Preferences, dpo_loss, pack, reward_loss
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.scorer import ScalarModel
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.checkpoint import metas, prune, read_meta
from palestra.runs.run import Run, open_run
from palestra.runs.store import read_json
from palestra.spec.kinds.lm import DpoLossSpec, RewardLossSpec
from palestra.spec.lm import AdamWSpec
from palestra.spec.shape import Shape

VOCAB = 40
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


# ---- gradients


def random_model(seed: int = 0, **changes: Any) -> Transformer:
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "context": 64, "vocab": VOCAB}
    model = Transformer(Shape.model_validate({**sizes, **changes}))
    model.initialize(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.ndim > 1 else 1  # far from a uniform model, whose gradients are all alike
    return model


def random_examples(count: int, seed: int = 0, longest: int = 40) -> list[Example]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = draw.integers(0, VOCAB, draw.integers(2, longest))
        found.append(Example(tokens.astype(np.int32), np.array([len(tokens)]), draw.random(len(tokens)) < 0.7))
    return found


def engine_of(model: nn.Module, micro_tokens: int) -> TrainEngine:
    optimizer = Optimizer(model, AdamWSpec(name="adamw"), 10)
    return TrainEngine(model, optimizer, Ranks(), micro_tokens=micro_tokens, flops_per_token=1.0)


def gradients(
    model: nn.Module, loss: LossFunction, batch: Batch, denominator: float, micro_tokens: int, group: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    model.zero_grad(set_to_none=True)
    sums = engine_of(model, micro_tokens).forward_backward(batch, loss, denominator, group=group)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, {name: float(value) for name, value in sums.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).abs().max() < tolerance * max(1.0, float(gradient.abs().max())), name


def assert_gradient_depends_on_the_batch_alone(
    model: nn.Module, loss: LossFunction, batch: Batch, denominator: float, group: int
) -> dict[str, Tensor]:
    whole, sums = gradients(model, loss, batch, denominator, 10**6, group)
    shuffled = batch.select_groups(torch.randperm(len(batch) // group, generator=torch.Generator()).tolist(), group)
    for part, micro_tokens in ((batch, 1), (batch, 60), (batch, 150), (shuffled, 10**6), (shuffled, 100)):
        found, told = gradients(model, loss, part, denominator, micro_tokens, group)
        assert_close(found, whole)
        assert told == pytest.approx(sums, rel=1e-5, abs=1e-6)
    return whole


@pytest.mark.parametrize("moe", [None, {**EXPERTS, "balance": 0.02, "z_loss": 0.01}])
def test_next_token_gradient_split_and_shuffled_is_the_same(moe):
    model, examples = random_model(moe=moe), random_examples(12)
    objective = NextToken(
        Mixture({"a": examples}, {"a": 1}, seed=0), {}, np.ones(VOCAB, int), batch=12, eval_examples=1
    )
    batch = pack(examples)
    denominator = objective.denominator(batch)
    assert denominator == sum(int(example.loss[1:].sum()) for example in examples if example.loss is not None)
    whole = assert_gradient_depends_on_the_batch_alone(model, objective.loss, batch, denominator, 1)
    if moe is None:  # and it is the mean over all trained tokens of the batch, computed a sequence at a time
        model.zero_grad(set_to_none=True)
        for example in examples:
            tokens = torch.from_numpy(example.tokens.astype(np.int64))
            scores = logits(forward(model, Batch.pack([tokens.tolist()])).hidden, model.unembed)
            assert example.loss is not None
            losses = F.cross_entropy(scores[:-1], tokens[1:], reduction="none")
            (losses[torch.from_numpy(example.loss[1:])].sum() / denominator).backward()
        assert_close(whole, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_preference_gradient_split_and_shuffled_is_the_same(kind):
    pairs = list(zip(random_examples(8, 1), random_examples(8, 2), strict=True))
    if kind == "dpo":
        model: nn.Module = random_model(0)
        loss = dpo_loss(DpoLossSpec(beta=0.05), random_model(1).requires_grad_(False))
    else:
        model, loss = ScalarModel(random_model(0)), reward_loss(RewardLossSpec(margin=0.1, center=0.01))
        nn.init.normal_(model.value.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    objective = Preferences(Mixture({"a": pairs}, {"a": 1}, seed=0), {}, loss, batch=8, eval_examples=1)
    batch = pack(list(chain.from_iterable(pairs)))
    assert objective.denominator(batch) == 8
    assert_gradient_depends_on_the_batch_alone(model, loss, batch, 8.0, 2)


def test_dpo_loss_of_a_batch_equals_the_closed_form_of_each_pair():
    model, reference = random_model(0), random_model(1).requires_grad_(False)
    pairs = list(zip(random_examples(5, 3), random_examples(5, 4), strict=True))

    def completion(of: Transformer, example: Example) -> Tensor:
        assert example.loss is not None
        tokens = torch.from_numpy(example.tokens.astype(np.int64))
        scores = logits(forward(of, Batch.pack([tokens.tolist()])).hidden, of.unembed).double()
        logprobs = scores.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        return logprobs[torch.from_numpy(example.loss[1:])]

    def deltas(reduce: Callable[[Tensor], Tensor]) -> list[float]:
        """log(π / reference) of the chosen completion less that of the rejected one."""
        ratios = [[float(reduce(completion(model, x)) - reduce(completion(reference, x))) for x in p] for p in pairs]
        return [chosen - rejected for chosen, rejected in ratios]

    with torch.no_grad():
        totals, means, batch = (
            deltas(torch.sum),
            deltas(torch.mean),
            pack(list(chain.from_iterable(pairs))),
        )
        sigmoid, ipo = dpo_loss(DpoLossSpec(), reference)(model, batch), DpoLossSpec(type="ipo")
        averaged = dpo_loss(ipo, reference)(model, batch)
        summed = dpo_loss(ipo.model_copy(update={"average_logprobs": False}), reference)(model, batch)
        even = dpo_loss(DpoLossSpec(average_logprobs=True), reference)(model, batch)
    assert float(sigmoid.total) == pytest.approx(sum(math.log1p(math.exp(-0.1 * d)) for d in totals), rel=1e-5)
    assert float(sigmoid.terms["accuracy"]) == sum(d > 0 for d in totals)
    assert float(averaged.total) == pytest.approx(sum((d - 1 / 0.2) ** 2 for d in means), rel=1e-5)  # as in TRL
    assert float(summed.total) == pytest.approx(sum((d - 1 / 0.2) ** 2 for d in totals), rel=1e-5)
    assert float(even.total) == pytest.approx(sum(math.log1p(math.exp(-0.1 * d)) for d in means), rel=1e-5)


def test_activation_checkpointing_computes_again_and_gives_equal_gradients(lab):
    batch = Batch.pack([list(range(1, 20)), list(range(3, 30))])
    found, calls = {}, {}
    for mode in ("none", "selective", "full"):
        spec = lab.checked("pretrain", train__checkpointing=mode, model__shape__layers=4)
        model = build_model(spec, start_of(spec, lab.root), 0, torch.device("cpu"))
        seen: list[int] = []
        for block in model.layers:
            block.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        objective = NextToken(Mixture({"a": [0]}, {"a": 1}, seed=0), {}, np.ones(64, int), batch=1, eval_examples=1)
        found[mode], _ = gradients(model, objective.loss, batch, 10.0, 10**6, 1)
        calls[mode] = len(seen)
    assert calls == {"none": 4, "selective": 6, "full": 8}
    for mode in ("selective", "full"):
        assert all(torch.equal(found[mode][name], gradient) for name, gradient in found["none"].items())


# ---- runs, and runs that build on them


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A folder with a finished run `sft`, one with adapters on it, `lora`, and a reward model; only to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        made = Lab(tmp_path_factory.mktemp("trained"))
        base = str(made.root / "sft")
        made.run("sft", train__steps=20, samples={"prompts": ["red cat"], "max_new_tokens": 4, "every": "10 steps"})
        made.run("sft", name="lora", model__init=base, model__lora={"rank": 4}, optim__lr=0.02)
        made.run("reward_model", model__init=base)
    return made


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def opened(lab: Lab, name: str) -> Run:
    return open_run(name, lab.root)


def folder_of(lab: Lab, name: str, which: str = "best") -> Path:
    return opened(lab, name).checkpoint(which) / "model"


def test_checkpoint_of_a_run_loads_in_transformers_with_equal_logits_and_greedy_answers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of(trained, "sft")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "red cat"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    ours = load_pretrained(folder).model
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
        found = logits(forward(ours, Batch.pack([tokens])).hidden, ours.unembed)
        assert (found - expected).abs().max() < 1e-4
        written = theirs.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0, len(tokens) :]
    assert palestra.load(trained.root / "sft").answer(
        "red cat", temperature=0.0, max_new_tokens=12
    ) == tokenizer.decode(written, skip_special_tokens=True)


def test_checkpoint_of_a_reward_model_loads_in_transformers_with_equal_scores(trained):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = folder_of(trained, "reward_model")
    theirs, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    scorer, scores = palestra.load(trained.root / "reward_model"), []
    for answer in ("yes red", "no"):
        chat = [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": answer}]
        with torch.no_grad():
            tokens = tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
            expected = float(theirs(tokens).logits)
        scores.append(scorer.score(chat))
        assert scores[-1] == pytest.approx(expected, abs=1e-4)
    assert scores[0] > scores[1]


def test_adapters_of_a_run_are_all_its_checkpoint_holds_and_load_merged(trained):
    checkpoint = opened(trained, "lora").checkpoint("last")
    weights = [path.name for path in (checkpoint / "model").iterdir() if path.suffix == ".safetensors"]
    assert weights == ["adapter_model.safetensors"]
    assert not (checkpoint / "model" / "config.json").exists()
    whole = opened(trained, "sft").checkpoint("last")
    sizes = [sum(path.stat().st_size for path in one.rglob("*.safetensors")) for one in (checkpoint, whole)]
    print(f"bytes of weights and optimizer: {sizes[0]} with adapters of rank 4, {sizes[1]} without")
    assert sizes[0] < sizes[1] / 2
    (base, _), (merged, _) = open_model(folder_of(trained, "sft")), open_model(checkpoint)
    changed = [
        name
        for name, weight in merged.model.state_dict().items()
        if not torch.equal(weight, base.model.state_dict()[name])
    ]
    assert changed
    assert all(name.endswith(("qkv.weight", "o.weight", "gate_up.weight", "down.weight")) for name in changed)
    assert all(p.requires_grad for p in merged.model.parameters())  # a plain model, to train on


@pytest.mark.parametrize("ref", ["run", "name", "checkpoint", "folder", "adapters"])
def test_model_to_start_from_is_found_by_each_of_its_names_and_is_where_the_run_starts(trained, lab, ref):
    named = {
        "run": str(trained.root / "sft"),
        "name": "sft",
        "checkpoint": str(opened(trained, "sft").checkpoint("best")),
        "folder": str(folder_of(trained, "sft")),
        "adapters": str(trained.root / "lora"),
    }[ref]
    spec = lab.checked("dpo", model__init=named)
    model = build_model(spec, start_of(spec, trained.root), 0, torch.device("cpu"))
    expected = open_model(folder_of(trained, "lora" if ref == "adapters" else "sft"))[0].model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_dpo_with_adapters_on_a_run_with_adapters_trains_and_loads_with_both(trained, lab):
    run = lab.run("dpo", model__init=str(trained.root / "lora"), model__lora={"rank": 2}, optim__lr=0.01)
    rows = rows_of(run)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are the same
    assert rows[0]["accuracy"] == 0.5
    assert rows[-1]["eval/accuracy"] > 0.9
    reopened = open_model(run.checkpoint("last"))[0].model.state_dict()
    start = open_model(folder_of(trained, "lora"))[0].model.state_dict()
    assert any(not torch.equal(reopened[name], start[name]) for name in start)
    assert isinstance(palestra.load(run).answer("red cat", max_new_tokens=3), str)


def test_reward_model_goes_on_from_a_reward_model_with_its_head_and_nothing_else_does(trained, lab):
    before = opened(trained, "reward_model")
    run = lab.run("reward_model", model__init=str(before.path), train__steps=1, optim__lr=0.0)
    best = int(before.checkpoint("best").name.removeprefix("step_"))
    margin = next(row["eval/margin"] for row in rows_of(before) if row["step"] == best)
    assert rows_of(run)[-1]["eval/margin"] == pytest.approx(margin, rel=1e-4)
    with pytest.raises(UsageError, match="is a reward model, which cannot generate text"):
        lab.run("sft", model__init=str(before.path))


def test_model_of_a_run_writes_from_plain_text(lab):
    run = lab.run("pretrain", model__tokenizer={"bpe": 300}, train__steps=2)
    model = palestra.load(run)
    assert model.write("red ", temperature=0.0, max_new_tokens=5) == model.write(
        "red ", temperature=0.0, max_new_tokens=5
    )
    assert len(model.generate(model.tokenizer.encode("red "), max_new_tokens=5, ignore_eos=True).tokens) == 5


def test_samples_are_written_at_their_steps_and_change_nothing(trained):
    rows = [
        json.loads(line) for line in (session_of(opened(trained, "sft")) / "samples.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row["prompt"]) for row in rows] == [(10, "red cat"), (20, "red cat")]
    silent = trained.run("sft", name="silent", train__steps=20)
    assert rows_of(silent) == rows_of(opened(trained, "sft"))


@pytest.mark.parametrize("start", ["plain", "adapters"])
def test_adapters_of_a_run_keep_its_chat_template_and_what_ends_a_turn(lab, start):
    """The model they are trained on never wrote chat, and has another template."""
    run = lab.run("pretrain", model__tokenizer={"bpe": 300}, train__steps=1)
    small = {"model__lora": {"rank": 2}, "train__steps": 1}
    run = lab.run("sft", model__init=str(run.path), model__chat_template=TEMPLATE, **small)
    if start == "adapters":  # which have the template that those above them are trained with
        run = lab.run("sft", name="second", model__init=str(run.path), **small)
    loaded, tokenizer = open_model(run.checkpoint("last"))
    assert tokenizer.chat_template == TEMPLATE
    assert end_of_turn(tokenizer) in loaded.eos
    assert None not in loaded.eos


def test_adapters_whose_base_leads_to_themselves_are_refused(tmp_path):
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        config = {"base_model_name_or_path": str(tmp_path / base)}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="leads back to these adapters"):
        open_model(tmp_path / "a")


@pytest.mark.parametrize("config", [{}, {"base_model_name_or_path": None}])
def test_adapters_that_name_no_base_are_refused(tmp_path, config):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="expected the model that it adapts in base_model_name_or_path"):
        open_model(tmp_path)


def test_checkpoint_that_a_run_starts_from_is_kept_and_resume_does_not_ask_for_its_name_again(lab):
    base = lab.run("pretrain", every__checkpoint="1 hours", every__eval=None)
    before = base.checkpoint("last")
    assert "kept" not in read_meta(before).reasons
    run = lab.run("pretrain", name="next", model__init="pretrain", train__steps=2)
    assert "kept" in read_meta(before).reasons
    assert load_checkpoint(before).step == 12  # all of it is still what its checksums say
    lab.resume(str(base.path), allow=["train"], train__steps=14)
    prune(session_of(base))
    assert before.exists()
    shutil.rmtree(base.path / "sessions" / "0" / "checkpoints" / "step_000000014")
    newer = lab.run("pretrain", train__steps=1, model__shape__width=16)
    assert open_run("pretrain", lab.root).path == newer.path
    again = lab.resume(str(run.path), allow=["train"], train__steps=3)
    assert again.state == "done"
    assert read_json(session_of(run) / "init.json")["model"] == str(before.absolute() / "model")


def test_resume_on_changed_data_is_refused_by_name_and_on_a_touched_file_is_not(lab):
    run = lab.run("sft", train__steps=2)
    data, source = lab.path / "chat.jsonl", (lab.path / "chat.jsonl").read_text()
    os.utime(data, (1, 1))
    lab.resume(str(run.path), allow=["train"], train__steps=3)
    data.write_text(source.replace("red", "der"))
    with pytest.raises(UsageError, match=r"data\.train\.chat: not what .* was started with"):
        lab.resume(str(run.path), allow=["train"], train__steps=4)
    data.write_text(source)
    assert lab.resume(str(run.path), allow=["train"], train__steps=4).state == "done"


def test_reward_loss_of_experts_has_their_router_terms():
    model = ScalarModel(random_model(moe={**EXPERTS, "balance": 0.1}))
    pairs = list(zip(random_examples(3, 3), random_examples(3, 4), strict=True))
    routed = reward_loss(RewardLossSpec())(model, pack(list(chain.from_iterable(pairs)))).routed
    assert routed is not None
    assert float(routed.load.sum()) == 2 * 2 * sum(len(example.tokens) for pair in pairs for example in pair)
    assert float(routed.total.detach()) > 0


def test_conversation_longer_than_the_reward_model_reads_is_refused(trained):
    chat = [{"role": "user", "content": "red cat " * 20}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(UsageError, match=r"the conversation has \d+ tokens; the reward model reads at most 48"):
        palestra.load(trained.root / "reward_model").score(chat)


# ---- what a run reports and saves


def test_moving_average_is_what_is_evaluated_and_saved_beside_the_weights(lab):
    run = lab.run("pretrain", optim=MUON, train__ema=0.8)
    checkpoint = load_checkpoint(run.checkpoint("last"))
    state = checkpoint.state["engine"]
    saved = load_pretrained(run.checkpoint("last") / "model").model
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, state["ema"]["average"][name])
        assert not torch.equal(weight, state["weights"][name])
    spec = lab.checked("pretrain")
    start = start_of(spec, lab.root)
    objective = objective_of(spec, start, text_data(spec.data, start.tokenizer_folder), 0, saved, Ranks())
    assert objective.evaluate(engine_of(saved, 10**6))["eval/loss"] == pytest.approx(rows_of(run)[-1]["eval/loss"])


def test_bits_per_byte_of_a_model_that_knows_nothing_is_that_of_its_vocabulary(lab):
    text = lab.path / "bytes.txt"
    text.write_text("Some plain letters, all of one byte each; " * 40)
    spec = lab.checked(
        "pretrain", model__tokenizer={"bpe": 300}, data__train={"text": {"path": str(text)}}, data__context=16
    )
    start = start_of(spec, lab.root)
    found = text_data(spec.data, start.tokenizer_folder)
    model = build_model(spec, start, 0, torch.device("cpu"))
    with torch.no_grad():
        model.embed.zero_()  # all tokens are as likely
    result = objective_of(spec, start, found, 0, model, Ranks()).evaluate(engine_of(model, 100))
    nats, size = 0.0, 0
    tokenizer = Tokenizer.load(start.tokenizer_folder)
    for index in range(len(found.evals["text"])):
        tokens = found.evals["text"][index].tokens[1:]
        nats += len(tokens) * math.log(model.shape.vocab or 0)
        size += len(tokenizer.decode(tokens.tolist()))  # without the end of the text
    assert result["eval/loss"] == pytest.approx(math.log(model.shape.vocab or 0), rel=1e-6)
    assert result["eval/bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-6)


def test_evaluation_sets_are_reported_each_and_together(lab):
    other = {"path": str(lab.path / "other.jsonl")}
    sources = {"text": {"path": str(lab.path / "text.jsonl")}, "capitals": {**other, "weight": 0.0}}
    run = lab.run("pretrain", model__tokenizer={"bpe": 300}, data__train=sources, train__steps=2, eval__examples=7)
    row = rows_of(run)[-1]
    assert {key for key in row if key.startswith("eval/")} == {
        f"eval/{name}{metric}" for name in ("", "text/", "capitals/") for metric in ("loss", "bits_per_byte")
    }
    assert min(row["eval/text/loss"], row["eval/capitals/loss"]) < row["eval/loss"]
    assert row["eval/loss"] < max(row["eval/text/loss"], row["eval/capitals/loss"])
    assert run.summary()["eval/loss"] == row["eval/loss"]


def test_evaluation_sets_of_pairs_are_reported_each_and_together(lab):
    again = {"again": {"path": str(lab.path / "pairs.jsonl")}}
    row = rows_of(lab.run("reward_model", data__eval=again, train__steps=2))[-1]
    held, whole = row["eval/pairs/accuracy"], row["eval/again/accuracy"]
    assert row["eval/accuracy"] == pytest.approx((6 * held + 60 * whole) / 66)


def poison(moment: Any) -> None:
    """A hook: in step 5 a weight is not a number."""
    weight = moment.policy.norm.weight
    with torch.no_grad():
        if moment.step == 4:
            weight[0] = math.nan
        elif moment.step == 5:
            weight[0] = 1.0


def test_step_that_is_not_finite_is_skipped_and_counted_and_moves_nothing(lab):
    run = lab.run(
        "pretrain", hooks=["test_lm_train:poison"], every__eval=None, model__shape__moe=EXPERTS, train__ema=0.5
    )
    rows = rows_of(run)
    assert [row["skipped"] for row in rows] == [float(step == 5) for step in range(1, 13)]
    assert [row["skipped_steps"] for row in rows] == [float(step >= 5) for step in range(1, 13)]
    assert math.isnan(rows[4]["loss"])
    assert all(math.isfinite(row["loss"]) for row in rows if row["step"] != 5)
    assert math.isfinite(rows[-1]["eval/loss"])


def test_profile_of_some_steps_is_a_chrome_trace(lab):
    run = lab.run("pretrain", train__profile={"steps": [2, 3]}, train__steps=4)
    trace = json.loads((session_of(run) / "profile.json").read_text())
    assert sum("aten::mm" in event["name"] for event in trace["traceEvents"] if "name" in event) >= 4


def test_hook_that_stops_a_run_ends_it_there_with_a_checkpoint(lab):
    run = lab.run("sft", hooks=["test_lm_train:enough"], samples={"prompts": ["red"], "max_new_tokens": 2})
    assert run.state == "done"
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]
    assert metas(session_of(run))[-1].step == 4
    assert "eval/loss" in rows_of(run)[-1]  # as at the end of every run
    assert '"step": 4' in (session_of(run) / "samples.jsonl").read_text()


def enough(moment: Any) -> None:
    """A hook: four steps are enough."""
    moment.stop = moment.step == 4


@pytest.mark.slow
def test_seeds_differ_and_each_is_the_run_of_its_seed_and_curves_are_drawn(lab, pictures):
    both = palestra.run(lab.spec("sft", max_session=2, train__steps=3), root=lab.root, quiet=True)
    assert (both.path / "plots" / "learning_curve.png").exists()
    assert both.summary()["eval/loss_by_seed"].keys() == {"0", "1"}
    alone = lab.run("sft", name="alone", seed=1, train__steps=3)
    rows = {seed: [row for row in rows_of(both) if row["seed"] == seed] for seed in (0, 1)}
    assert rows[1] == rows_of(alone)
    assert rows[0][0]["loss"] != rows[1][0]["loss"]


@pytest.mark.slow
def test_compiled_run_has_the_losses_of_one_that_is_not_and_its_code_is_kept(lab):
    cache = lab.path / "compiled"
    plain, compiled = (
        lab.run("pretrain", name=mode, train__steps=4, train__compile=mode, train__compile_cache=where)
        for mode, where in (("off", None), ("on", str(cache)))
    )
    for row, expected in zip(rows_of(compiled), rows_of(plain), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert any(path.is_file() for path in cache.rglob("*"))
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") != str(cache)
    torch._dynamo.reset()  # as a new process begins
    counters = torch._dynamo.utils.counters["inductor"]
    hits, misses = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]
    assert misses > 0
    again = lab.run("pretrain", name="again", train__steps=4, train__compile="on", train__compile_cache=str(cache))
    assert rows_of(again) == rows_of(compiled)
    assert counters["fxgraph_cache_miss"] == misses
    assert counters["fxgraph_cache_hit"] > hits
