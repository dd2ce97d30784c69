"""Searches over kinds of experiment, several seeds a trial, and trials that fail."""

import pytest
from conftest import numbers
from search_specs import BASE, SEARCH
from tiny_lm import Lab

from palestra.errors import PalestraError
from palestra.runs.checkpoint import metas
from palestra.runs.session import state_of
from palestra.search.experiment import search
from palestra.search.results import Experiment


def test_trial_that_fails_has_no_score_and_is_never_best(tmp_path):
    space = {"env.kwargs.fault": {"choice": ["none", "raise", "nan_reward"]}}
    spec = {
        **BASE,
        "env": {"id": "Faulty-v0", "num_envs": 2, "module": "envs", "kwargs": {"at": 40, "fault": "none"}},
        "algorithm": {**BASE["algorithm"], "horizon": 64},
        "train": {"frames": 256},
        "search": {"trials": 3, "sampler": "random", "seed": 3, "space": space, "parallel": 1},
    }
    found = search(spec, root=tmp_path, quiet=True)
    states = {}
    for trial in found.summary()["trials"]:
        states[trial["values"]["env.kwargs.fault"]] = trial["state"]
        if trial["state"] == "failed":
            assert trial["score"] is None
            assert "door is stuck" in trial["reason"] or "reward" in trial["reason"]
    assert states == {"none": "complete", "raise": "failed", "nan_reward": "failed"}
    best = found.summary()["trials"][found.summary()["best"]]
    assert best["values"]["env.kwargs.fault"] == "none"
    assert "Traceback" in (found.trial(_first(found, "raise")) / "log.txt").read_text()

    only = {
        **spec,
        "search": {**spec["search"], "trials": 2, "space": {"env.kwargs.fault": {"choice": ["raise", "nan_reward"]}}},
    }
    with pytest.raises(PalestraError, match="all 2 trials failed"):
        search(only, root=tmp_path / "all", quiet=True)


def _first(found: Experiment, fault: str) -> int:
    trials = found.summary()["trials"]
    return next(trial["trial"] for trial in trials if trial["values"]["env.kwargs.fault"] == fault)


def test_language_model_search_minimizes_its_loss_and_pauses(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    lab = Lab(tmp_path)
    block = {
        "trials": 3,
        "parallel": 1,
        "space": {"optim.lr": {"choice": [1e-5, 1e-2, 1e-4]}},
        "sampler": "random",
        "seed": 2,
        "pruner": {"asha": {"grace": 5, "reduction": 3}},
    }
    found = search({**lab.spec("pretrain"), "search": block}, root=lab.root, quiet=True)
    summary = found.summary()
    assert (summary["metric"], summary["direction"]) == ("eval/loss", "minimize")
    first = {trial["trial"]: trial["scores"]["0"] for trial in summary["trials"]}
    assert summary["best"] == min(first, key=lambda trial: (first[trial], trial))
    assert [trial["state"] for trial in summary["trials"]].count("complete") == 1
    pruned = [trial["trial"] for trial in summary["trials"] if trial["state"] == "pruned"]
    for number in pruned:
        session = found.trial(number) / "sessions" / "0"
        assert 5 <= metas(session)[-1].step <= 6  # a language model's trainer looks before it evaluates
        assert state_of(session) == "interrupted"


@pytest.mark.slow
def test_two_seeds_a_trial_are_averaged_and_paused_together(tmp_path):
    block = {**SEARCH, "trials": 2, "pruner": {"asha": {"grace": 2, "reduction": 2, "by": "frames"}}}
    spec = {**BASE, "max_session": 2, "train": {"frames": 4 * 128}, "search": block}
    found = search(spec, root=tmp_path, quiet=True, overrides={"search.pruner.asha.grace": 256})
    summary = found.summary()
    assert summary["seeds"] == [0, 1]
    for trial in summary["trials"]:
        rows = [numbers(found.trial(trial["trial"]) / "sessions" / str(seed)) for seed in (0, 1)]
        last = [each[-1]["eval/return"] for each in rows]
        assert trial["score"] == pytest.approx(sum(last) / 2)
        assert [each[-1]["frame"] for each in rows] == [512 if trial["state"] == "complete" else 256] * 2
