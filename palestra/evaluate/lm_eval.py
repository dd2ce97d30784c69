"""Evaluation with lm-eval: its tasks, filters and metrics over our engine, and its results in our form."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from palestra.data.chat import render
from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError, did_you_mean
from palestra.evaluate.likelihood import EncodedChoice, beginning, encode_pairs, score_sequences
from palestra.evaluate.records import EvaluationRecord, VerifiedCompletion
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Generation, Request, Sampling
from palestra.lm.model import Transformer
from palestra.spec.kinds.evaluate import LmEvalUse
from palestra.tasks.task import Status, Verdict

NEW_TOKENS = 256
"""Of a completion whose task has no limit, as in lm-eval."""
TOGETHER = 1024
"""Completions between two looks at whether to go on."""
BOOTSTRAP = 1000
"""Resamples for the standard errors that have no closed form; lm-eval's own default takes a minute for each."""
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SAMPLERS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
READ = {"until", "max_gen_toks", "do_sample", *SAMPLERS}


class EngineLM(LM):
    """A model of lm-eval: likelihoods by packed sequences, completions by our engine."""

    rows = 256
    """Completions in flight."""
    look: Callable[[], None] = staticmethod(lambda: None)
    """Called now and then; may raise to end it."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, eos: Iterable[int], bos: bool | None = None):
        """`bos` is that of `beginning`."""
        super().__init__()
        self.model, self.tokenizer, self.eos, self.begins = model, tokenizer, eos, beginning(tokenizer, bos)
        self._device = model.embed.device
        self.generations: dict[str, list[tuple[int, Generation]]] = {}
        """By prompt: its tokens, and its completions."""

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = render(self.tokenizer, chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]  # the model continues it; templates may trim it
        last = last if last in text else last.strip()
        return text[: text.rindex(last) + len(last)]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, in which special strings mean their tokens, with those that begin it."""
        tokens = self.tokenizer.encode(text, specials=True)
        return tokens if tokens[: len(self.begins)] == list(self.begins) else [*self.begins, *tokens]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs: list[Any] = [request.args for request in requests]
        encoded = encode_pairs(self.tokenizer, pairs, self.model.shape.context, self.begins, specials=True)
        return score_sequences(self.model, encoded)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        first, texts = self.tokenizer.encode_prompt("")[-1], []
        for request in requests:
            windows = get_rolling_token_windows(self.encode(request.args[0]), first, self.model.shape.context, 1)
            # A window's targets are one token after its inputs; only the last ones are scored.
            whole = (([*inputs, targets[-1]], len(targets)) for inputs, targets in windows)
            texts.append([EncodedChoice(tokens, len(tokens) - count, False) for tokens, count in whole])
        scores = iter(score_sequences(self.model, [window for windows in texts for window in windows]))
        return [sum(next(scores)[0] for _ in windows) for windows in texts]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        asked = [self._asked(index, *request.args) for index, request in enumerate(requests)]
        context = max(len(one.prompt) + one.sampling.max_new_tokens for one in asked)
        settings: dict[str, Any] = {"device": self._device, "context": context, "max_running": self.rows}
        engine = Engine(self.model, eos=frozenset(self.eos), tokenizer=self.tokenizer, **settings)
        results = []
        for start in range(0, len(asked), TOGETHER):
            self.look()
            results += engine.run(asked[start : start + TOGETHER])
        for request, result in zip(requests, results, strict=True):
            self.generations.setdefault(request.args[0], []).append((len(result.prompt), result.generations[0]))
        return [result.generations[0].text or "" for result in results]

    def _asked(self, index: int, prompt: str, settings: Mapping[str, Any]) -> Request:
        """The request for a completion; where it is sampled, the index makes each one different."""
        normal: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        if unknown := set(normal) - READ:
            raise UsageError(f"generation_kwargs: {sorted(unknown)} are not known: expected some of {sorted(READ)}")
        new, context = normal["max_gen_toks"], self.model.shape.context
        if new >= context:
            raise UsageError(f"max_gen_toks of {new} leaves no room for a prompt in the model's context of {context}")
        tokens = self.encode(prompt) or self.tokenizer.encode_prompt("")
        chosen = {name: normal[name] for name in SAMPLERS if name in normal}
        greedy = not chosen.get("temperature")
        chosen |= {"temperature": 0.0, "seed": 0} if greedy else {"seed": stream_key(0, "lm_eval", index) >> 1}
        stops = tuple(stop for stop in normal["until"] if stop)
        return Request(tuple(tokens[new - context :]), Sampling(**chosen, max_new_tokens=new, stop=stops))


def task_manager(use: LmEvalUse) -> TaskManager:
    """What knows the task: the folder's tasks alone or, which takes seconds to read, lm-eval's own too."""
    if use.tasks is not None and not Path(use.tasks).exists():
        raise UsageError(f"lm_eval:{use.task}: there is no folder or file of tasks {use.tasks}")
    if use.tasks is not None and use.task in _manager(use.tasks, defaults=False).all_subtasks:
        return _manager(use.tasks, defaults=False)
    manager = _manager(use.tasks, defaults=True)
    if use.task not in manager.all_tasks:
        hint = did_you_mean(use.task, manager.all_tasks, "`lm_eval ls tasks` lists them.")
        raise UsageError(f"lm-eval has no task, group or tag {use.task!r}. {hint}")
    return manager


@cache
def _manager(tasks: str | None, defaults: bool) -> TaskManager:
    folder = None if tasks is None else str(Path(tasks) if Path(tasks).is_dir() else Path(tasks).parent)
    return TaskManager(include_path=folder, include_defaults=defaults)


Found = tuple[dict[str, dict[str, Any]], list[EvaluationRecord], list[dict[str, Any]]]


def run_lm_eval(lm: EngineLM, use: LmEvalUse, problems: int) -> Found:
    """The outcomes by task; completions with their verdicts; and what else was scored, a row a document.

    Seeds are lm-eval's own, so that few-shot examples are those that it would show.
    """
    manager = task_manager(use)
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork a process that has threads, and hang
    settings = {"apply_chat_template": use.chat, "confirm_run_unsafe_code": use.unsafe_code}
    settings |= {"num_fewshot": use.shots, "limit": problems, "bootstrap_iters": BOOTSTRAP}
    try:
        results: Any = simple_evaluate(lm, tasks=[use.task], task_manager=manager, **settings)
    except PalestraError:
        raise
    except Exception as error:  # data that is not there, a template that fails, code that may not run: whatever it has
        raise UsageError(f"lm_eval:{use.task}: {type(error).__name__}: {error}") from error
    outcomes, records, rows = {}, [], []
    for task, samples in results["samples"].items():
        outcomes[task] = _outcome(task, results)
        if results["configs"][task]["output_type"] == "generate_until":
            records += _records(lm, task, samples)
        else:
            rows += [_row(task, sample) for sample in samples]
    return outcomes, records, rows


def _outcome(task: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Counts; by metric, and filter where there are several, the value and its standard error where there is one."""
    values = {tuple(key.split(",")): value for key, value in results["results"][task].items() if "," in key}
    several = len({filter for _, filter in values}) > 1
    metrics = {}
    for metric, filter in (key for key in values if not key[0].endswith("_stderr")):
        error = values.get((f"{metric}_stderr", filter))  # N/A where there is none
        name, error = f"{metric},{filter}" if several else metric, error if isinstance(error, float) else None
        metrics[name] = float(values[metric, filter]), error
    count, shots = results["n-samples"][task], results["n-shot"][task]
    return {"documents": count["effective"], "of": count["original"], "shots": shots, "metrics": metrics}


def _scores(sample: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a document that are numbers, or lists of them, whose mean it is."""
    values = {name: sample[name] for name in sample["metrics"]}
    values = {name: fmean(value) if isinstance(value, list) and value else value for name, value in values.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _records(lm: EngineLM, task: str, samples: Sequence[Mapping[str, Any]]) -> list[EvaluationRecord]:
    """One record a document: its score is the first metric, all of them by all filters are its parts."""
    documents: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        documents.setdefault(sample["doc_id"], []).append(sample)
    records = []
    for number, readings in documents.items():
        parts = {f"{name},{one['filter']}": value for one in readings for name, value in _scores(one).items()}
        score = next(iter(parts.values()), 0.0)
        note = " | ".join(f"{one['filter']}: {one['filtered_resps'][0]}" for one in readings)[:500]
        verdict = Verdict(score, Status.CORRECT if score == 1.0 else Status.WRONG, parts, note=note)
        prompt = readings[0]["arguments"][0][0]
        written = lm.generations[prompt]
        answers = (VerifiedCompletion(one.text or "", len(one.tokens), one.stop_reason, verdict) for _, one in written)
        records.append(EvaluationRecord(f"{task}/{number}", task, "greedy", prompt, written[0][0], tuple(answers)))
    return records


def _row(task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    row = {"task": task, "item": sample["doc_id"], "filter": sample["filter"], "target": sample["target"]}
    row |= {"prompts": [list(arguments) for arguments in sample["arguments"]], "responses": sample["resps"]}
    return json.loads(json.dumps({**row, **_scores(sample)}, default=str))
