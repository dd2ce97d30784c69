"""Suites: the border of CORE and bits a byte against plain loops, what a spec may say, and the file of results."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lm import CONTEXT, small_model, small_tokenizer
from tiny_lm import write_rows

import palestra
from palestra.data.tokenizers import Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError
from palestra.evaluate import likelihood
from palestra.evaluate import likelihood as texts_module
from palestra.evaluate.likelihood import (
    encode_item,
    likelihood_outcome,
    score_set,
    text_outcome,
    windows,
)
from palestra.evaluate.likelihood_data import Choices, Item, Option, Texts, load_texts
from palestra.evaluate.suites import (
    add_result,
    begin_results,
    check_suite,
    measure,
    open_suite,
    suite_metrics,
)
from palestra.lm.batch import Batch, forward
from palestra.lm.model import Transformer
from palestra.runs.store import read_json
from palestra.spec.kinds.evaluate import EvaluateSpec, LikelihoodUse, TextUse
from palestra.spec.load import resolved
from palestra.spec.tasks import SUITES, SuiteUse, suite_conflicts, suite_spec

ROOT = Path(__file__).parents[1]
TOKENIZER = small_tokenizer()
CORE = Path(os.environ.get("PALESTRA_DATA", ROOT.parent / "shared/data")) / "core_eval"
needs_core = pytest.mark.skipif(not CORE.is_dir(), reason="needs core_eval in the folder PALESTRA_DATA")
WORDS = ["red", "green", "blue", "red hen", "no", "red hen sits"]


@torch.no_grad()
def plain_loss(model: Transformer, tokens: list[int], start: int) -> list[float]:
    """Nats of each token from `start` on, one at a time, in float64."""
    found = []
    for place in range(start, len(tokens)):
        hidden = forward(model, Batch.pack([tokens[:place]])).hidden[-1].double()
        found.append(-float((model.unembed.double() @ hidden).log_softmax(-1)[tokens[place]]))
    return found


def common(sequences: list[list[int]]) -> int:
    """The plainest count of the tokens that all have at their beginning."""
    count = 0
    while all(len(one) > count for one in sequences) and len({one[count] for one in sequences}) == 1:
        count += 1
    return count


def bpe() -> Tokenizer:
    return train_bpe(["the cat sat on the mat. the dog sat. Answer: the cat"] * 40, 300)


BPE = bpe()


def suite_of(items: list[Item], **settings: Any) -> Choices:
    return Choices(LikelihoodUse(path="some.jsonl", border="common", **settings), tuple(items), len(items))


def choice(context: str, *answers: str, gold: int = 0) -> Item:
    return Item(tuple(Option(context, answer) for answer in answers), gold)


def schema(answer: str, *contexts: str, gold: int = 0) -> Item:
    return Item(tuple(Option(context, answer) for context in contexts), gold)


# ---- the border of CORE


def test_choices_are_scored_from_the_first_token_that_differs_as_a_plain_loop_does():
    model, draw = small_model(), random.Random(3)
    items = []
    for _ in range(24):
        answers = draw.sample(["red hen", "red dog", "red", "blue", "red hens"], 3)
        items.append(choice(" ".join(draw.choices(WORDS, k=2)) + " ", *answers, gold=draw.randrange(3)))
    suite, right = suite_of(items), []
    for item, one in zip(items, score_set(model, TOKENIZER, suite), strict=True):
        texts = [TOKENIZER.encode(option.context + option.answer) for option in item.options]
        start = min(common(texts), min(map(len, texts)) - 1)
        losses = [plain_loss(model, tokens, start) for tokens in texts]
        assert one.logprobs == pytest.approx([-sum(some) for some in losses], abs=1e-4)
        assert one.tokens == tuple(map(len, losses))
        means = [sum(some) / len(some) for some in losses]
        assert one.chosen("token") == means.index(min(means))
        right.append(means.index(min(means)) == item.gold)
    outcome = likelihood_outcome(suite, score_set(model, TOKENIZER, suite))
    accuracy = sum(right) / len(right)
    assert outcome.accuracy.mean == pytest.approx(accuracy)
    assert outcome.centred == pytest.approx((accuracy - 1 / 3) / (1 - 1 / 3))


def test_contexts_are_scored_by_their_common_end_as_a_plain_loop_does():
    model = small_model()
    items = [schema("sits here", "the cat is old ", "the hen is old "), schema("no.", "red ", "green ")]
    for item, one in zip(items, score_set(model, TOKENIZER, suite_of(items)), strict=True):
        texts = [TOKENIZER.encode(option.context + option.answer) for option in item.options]
        end = common([tokens[::-1] for tokens in texts])
        losses = [plain_loss(model, tokens, len(tokens) - end) for tokens in texts]
        assert one.tokens == (end, end)
        assert one.logprobs == pytest.approx([-sum(some) for some in losses], abs=1e-4)
    whole = encode_item(TOKENIZER, items[0], 99, "common")
    assert {TOKENIZER.decode(one.tokens[one.start :]) for one in whole} == {" is old sits here"}


def test_answer_that_another_begins_with_keeps_a_token_to_score():
    encoded = encode_item(BPE, choice("the mat. ", "the cat", "the cat sat"), 99, "common")
    assert encoded[0].start == encoded[1].start == len(encoded[0].tokens) - 1
    same = encode_item(BPE, schema("cat", "the ", "the "), 99, "common")
    assert all(1 <= one.start < len(one.tokens) for one in same)


@settings(max_examples=60)
@given(
    st.text("the catson Answer:.", max_size=20),
    st.lists(st.text("the catson.", min_size=1, max_size=8), min_size=2, max_size=4),
    st.booleans(),
)
def test_common_border_scores_what_differs_and_something_of_each(context, answers, contexts_vary):
    item = schema(context + "x", *answers) if contexts_vary else choice(context, *answers)
    encoded = encode_item(BPE, item, 99, "common")
    assert all(0 < one.start < len(one.tokens) for one in encoded)
    if contexts_vary and not item.one_context:
        assert len({tuple(one.tokens[one.start :]) for one in encoded}) == 1
    elif not contexts_vary:
        assert len({tuple(one.tokens[: one.start]) for one in encoded}) == 1


def test_bytes_are_those_of_the_scored_tokens():
    (one,) = score_set(small_model(), TOKENIZER, suite_of([choice("red ", "red hen", "red dog and")]))
    assert one.bytes == (len("hen"), len("dog and"))


def test_context_that_is_too_long_loses_its_beginning():
    item = choice("abcdefghij" * 12 + " ", "red hen", "red dog")
    for one, answer in zip(encode_item(TOKENIZER, item, CONTEXT, "common"), ("hen", "dog"), strict=True):
        assert one.cut
        assert len(one.tokens) == CONTEXT
        assert TOKENIZER.decode(one.tokens[one.start :]) == answer


# ---- bits a byte


@given(st.text("redgnhblu ", min_size=1, max_size=200), st.integers(2, 50))
def test_windows_score_every_token_once(document, context):
    tokens = TOKENIZER.encode(document)
    cut = windows(TOKENIZER, document, context)
    assert [token for one in cut for token in one.tokens[one.start :]] == tokens
    assert all(len(one.tokens) <= context and one.start >= 1 for one in cut)
    whole = [*TOKENIZER.encode_prompt(""), *tokens]
    assert cut[0].tokens == whole[: len(cut[0].tokens)]


def test_bits_a_byte_equal_a_plain_loop_and_long_documents_count_for_their_length(monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", 2)
    model = small_model()
    documents = ("red hen", "green " * 20, "a", "blue dog sits")
    texts = Texts(TextUse(path="some.jsonl"), documents, 4)
    scored = score_set(model, TOKENIZER, texts)
    nats = 0.0
    for document, one in zip(documents, scored, strict=True):
        losses = [plain_loss(model, some.tokens, some.start) for some in windows(TOKENIZER, document, CONTEXT)]
        mine = sum(map(sum, losses))
        assert one.logprob == pytest.approx(-mine, abs=1e-3)
        assert (one.tokens, one.bytes) == (len(TOKENIZER.encode(document)), len(document.encode()))
        nats += mine
    assert scored[1].windows == 2
    outcome = text_outcome(texts, scored)
    assert outcome.bits_per_byte == pytest.approx(nats / math.log(2) / sum(len(d) for d in documents), abs=1e-5)
    assert score_set(model, TOKENIZER, texts, done=scored[:2]) == scored  # the same bits after a kill


def test_texts_of_lines_and_rows_are_read_and_empty_ones_left_out(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo\nthree\n")
    found = load_texts(TextUse(path=str(tmp_path / "lines.txt"), split="\n", items=2))
    assert (found.items, found.total) == (("one", "two"), 3)
    path = write_rows(tmp_path / "rows.jsonl", [{"body": "x"}, {"body": ""}])
    assert load_texts(TextUse(path=path, key="body")).items == ("x",)
    with pytest.raises(UsageError, match="there is no 'text'"):
        load_texts(TextUse(path=path))


def test_kind_evaluate_scores_texts_and_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    import eval_lab

    from palestra.cli.show import show_evaluation

    monkeypatch.setattr(likelihood, "CHUNK", 2)
    path = write_rows(tmp_path / "tales.jsonl", [{"text": word * 3} for word in WORDS])
    spec = eval_lab.spec_of(eval_lab.save_model(tmp_path / "model"), texts=[{"path": path}])
    whole = eval_lab.run(tmp_path, spec)
    report = read_json(eval_lab.session_of(whole) / "evaluation.json")
    (row,) = whole.metrics()
    assert row["eval/tales/bits_per_byte"] == report["texts"]["tales"]["bits_per_byte"] == row["eval/bits_per_byte"]
    assert report["texts"]["tales"]["bytes"] == sum(3 * len(word) for word in WORDS)
    show_evaluation(whole)
    assert f"{row['eval/bits_per_byte']:.3f}" in capsys.readouterr().out
    lines = (eval_lab.session_of(whole) / "texts.jsonl").read_text().splitlines(keepends=True)
    scored: list[int] = []
    real = texts_module._score_documents

    def failing(model: Any, tokenizer: Any, texts: Any, numbers: range) -> Any:
        scored.extend(numbers)
        if 4 in numbers and len(scored) == 6:
            raise KeyboardInterrupt
        return real(model, tokenizer, texts, numbers)

    monkeypatch.setattr(texts_module, "_score_documents", failing)
    with pytest.raises(KeyboardInterrupt):
        eval_lab.run(tmp_path, {**spec, "name": "cut"})
    again = eval_lab.run(tmp_path, resume="cut")
    assert scored == [0, 1, 2, 3, 4, 5, 4, 5]
    assert (eval_lab.session_of(again) / "texts.jsonl").read_text().splitlines(keepends=True) == lines


# ---- a suite


def write_suite(folder: Path, **blocks: Any) -> EvaluateSpec:
    rows = [{"query": f"{a} {b}", "choices": [a, b, "no"], "gold": 1} for a in WORDS for b in WORDS if a != b]
    likelihood = [{"path": write_rows(folder / "pick.jsonl", rows), "shots": 2, "border": "common"}]
    texts = [{"path": write_rows(folder / "tales.jsonl", [{"text": word * 3} for word in WORDS])}]
    tasks = [{"task": "eval_tasks:Letters", "name": "letters", "args": {"size": 6}}]
    spec = {"kind": "evaluate", "name": "mine", "model": {"init": "none"}, "eval": {"max_new_tokens": 4}}
    spec |= {"likelihood": likelihood, "texts": texts, "tasks": tasks, **blocks}
    (folder / "mine.json").write_text(json.dumps(spec))
    return suite_spec(SuiteUse(suite=str(folder / "mine.json"), limit=7))


def letters() -> Tokenizer:
    return character_tokenizer("0123456789+-*=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?:()\n")


def test_suite_has_the_value_of_every_task_and_their_centred_mean(tmp_path):
    from palestra.tasks.verify.workers import Verifiers

    spec, tokenizer = write_suite(tmp_path), letters()
    model = small_model(vocab=tokenizer.vocab_size, deviation=0.3)
    with Verifiers(spec.tasks) as judges:
        suite = open_suite("mine", spec, judges.tasks, tokenizer)
        result = measure(suite, model, tokenizer, judges.verify, eos=[tokenizer.eos or 0])
        again = measure(suite, model, tokenizer, judges.verify, eos=[tokenizer.eos or 0])
    assert again == result
    assert [len(suite.choices[0].items), len(suite.texts[0].items), len(suite.questions[0].questions)] == [7, 6, 6]
    tasks = result["tasks"]
    assert {label: task["type"] for label, task in tasks.items()} == {
        "pick": "likelihood",
        "tales": "texts",
        "letters": "task",
    }
    assert (
        tasks["pick"]["value"]
        == likelihood_outcome(suite.choices[0], score_set(model, tokenizer, suite.choices[0])).accuracy.mean
    )
    assert tasks["letters"]["value"] == tasks["letters"]["greedy"]["accuracy"]["mean"]
    assert result["centred"] == pytest.approx((tasks["pick"]["centred"] + tasks["letters"]["value"]) / 2)
    assert suite_metrics("mine", result) == {
        "suite/mine/pick": tasks["pick"]["value"],
        "suite/mine/tales": tasks["tales"]["bits_per_byte"],
        "suite/mine/letters": tasks["letters"]["value"],
        "suite/mine/centred": result["centred"],
    }


def test_questions_of_a_suite_depend_on_its_seed_alone(tmp_path):
    spec = write_suite(tmp_path, tasks=[])
    first, second = (open_suite("mine", spec, {}, letters()) for _ in range(2))
    other = open_suite("mine", spec.model_copy(update={"seed": 1}), {}, letters())
    assert first.choices[0].items == second.choices[0].items
    assert first.choices[0].items != other.choices[0].items
    assert first.identity(letters()) == second.identity(letters())
    # The same question with fewer of them: a limit cuts, it does not draw others.
    fewer = suite_spec(SuiteUse(suite=str(tmp_path / "mine.json"), limit=3))
    assert open_suite("mine", fewer, {}, letters()).choices[0].items == first.choices[0].items[:3]


def test_suite_that_cannot_be_scored_is_refused_before_training(tmp_path):
    spec = write_suite(tmp_path, tasks=[])
    check_suite(open_suite("mine", spec, {}, letters()), letters(), CONTEXT)
    with pytest.raises(UsageError, match=r"suite mine: pick, row 1: .*no token for '\\n'"):
        check_suite(open_suite("mine", spec, {}, TOKENIZER), TOKENIZER, CONTEXT)
    with pytest.raises(UsageError, match=r"suite mine: pick, row \d+: an answer of .* tokens leaves no room"):
        check_suite(open_suite("mine", spec, {}, letters()), letters(), 8)
    unknown = write_suite(
        tmp_path,
        tasks=[],
        likelihood=[],
        texts=[{"path": write_rows(tmp_path / "t.jsonl", [{"text": "a"}, {"text": "é"}])}],
    )
    with pytest.raises(UsageError, match=r"suite mine: t, document 2: .*no token for 'é'"):
        check_suite(open_suite("mine", unknown, {}, letters()), letters(), CONTEXT)


# ---- what a spec may say


def test_spec_says_what_is_wrong_with_its_suites():
    uses = [
        SuiteUse(suite="cores"),
        SuiteUse(suite="a/mine.yaml", mode="after", every="5 steps"),  # type: ignore[arg-type]
        SuiteUse(suite="b/mine.yaml", every="5 frames"),  # type: ignore[arg-type]
    ]
    found = {(path[1:], why.split(",")[0].split(":")[0]) for path, why in suite_conflicts(uses, ("steps", "tokens"))}
    assert found == {
        ((0, "suite"), "expected a file of kind evaluate such as mine.yaml"),
        ((1, "every"), "expected null"),
        ((1, "name"), "expected another name"),
        ((2, "every"), "expected steps or tokens"),
        ((2, "name"), "expected another name"),
    }
    assert [use.label for use in uses] == ["cores", "mine", "mine"]
    assert SuiteUse(suite="x/many.yaml:second").label == "second"
    assert not list(suite_conflicts([SuiteUse(suite="core"), SuiteUse(suite="x.yml")], ("steps",)))


def test_suite_file_of_another_kind_or_with_a_reserved_name_is_refused(tmp_path):
    with pytest.raises(UsageError, match="of kind pretrain, expected one of kind evaluate"):
        suite_spec(_pretrain(tmp_path))
    with pytest.raises(UsageError, match="a task called 'centred'"):
        write_suite(tmp_path, likelihood=[{"path": "x.jsonl", "name": "centred"}])


def _pretrain(folder: Path) -> SuiteUse:
    spec = {
        "kind": "pretrain",
        "name": "p",
        "model": {"tokenizer": "characters", "shape": {"layers": 1, "width": 8, "heads": 1, "mlp": 8, "context": 8}},
        "data": {"train": {"t": {"path": "t.txt"}}, "context": 8},
        "train": {"steps": 1, "batch": 1},
    }
    (folder / "p.json").write_text(json.dumps(spec))
    return SuiteUse(suite=str(folder / "p.json"))


def test_example_of_core_is_the_suite_of_that_name():
    example = palestra.check(ROOT / "examples/evaluate/core.yaml").spec
    assert isinstance(example, EvaluateSpec)
    known = resolved({"kind": "evaluate", "name": "core", "model": {"init": "x"}, **SUITES["core"]})
    assert isinstance(known, EvaluateSpec)
    assert example.likelihood == known.likelihood


@needs_core
def test_core_files_are_read_and_fit(monkeypatch):
    monkeypatch.setenv("PALESTRA_DATA", str(CORE.parent))
    spec = suite_spec(SuiteUse(suite="core", limit=4))
    suite = open_suite("core", spec, {}, BPE)
    forms = {one.label: (one.items[0].choice, one.items[0].one_context) for one in suite.choices}
    assert len(forms) == 13
    assert forms["arc_easy"] == (True, True)
    assert forms["winogrande"] == (True, False)
    assert forms["lambada_openai"] == (False, True)
    assert all(len(one.items) == 4 for one in suite.choices)
    shown = next(one for one in suite.choices if one.label == "arc_easy").items[0].options[0].context
    assert (shown.count("\n\n"), shown.count("\nAnswer: ")) == (10, 11)


# ---- the file of results


def setup_of(**blocks: Any) -> dict[str, Any]:
    return {"seed": 0, "decoding": None, "likelihood": {}, "texts": {}, "tasks": {}, **blocks}


def test_results_of_a_killed_process_are_measured_again_and_others_kept(tmp_path):
    begin_results(tmp_path, {"a": setup_of(), "b": setup_of()})
    for step in (5, 10, 15):
        add_result(tmp_path, "a", {"steps": step, "tokens": 2 * step}, {"tasks": {}, "centred": step / 100})
    begin_results(tmp_path, {"a": setup_of(), "c": setup_of()})
    add_result(tmp_path, "a", {"steps": 10, "tokens": 20}, {"tasks": {}, "centred": 0.5})
    found = read_json(tmp_path / "results.json")["suites"]
    assert [(row["step"], row["tokens"], row["centred"]) for row in found["a"]["rows"]] == [
        (5, 10, 0.05),
        (10, 20, 0.5),
    ]
    assert list(found) == ["a", "b", "c"]


def test_resuming_with_other_questions_is_refused(tmp_path):
    begin_results(tmp_path, {"a": setup_of(likelihood={"pick": {"items_sha256": "1"}})})
    with pytest.raises(UsageError, match=r"suite a: likelihood.pick is not what .* was started with"):
        begin_results(tmp_path, {"a": setup_of(likelihood={"pick": {"items_sha256": "2"}})})
    with pytest.raises(UsageError, match=r"suite a: likelihood\.pick"):
        begin_results(tmp_path, {"a": setup_of()})
    with pytest.raises(UsageError, match="the seed or the decoding"):
        begin_results(tmp_path, {"a": setup_of(likelihood={"pick": {"items_sha256": "1"}}, seed=1)})
