"""Control specs broken at random: an error of ours that says where, never a traceback of something else."""

import copy
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import palestra
from palestra.errors import PalestraError
from palestra.spec.kinds.control import ControlSpec

ALGORITHMS: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "sarsa": {},
    "a2c": {"lr": {"shape": "linear", "start": 1e-3, "end": 0}},
    "ppo": {"horizon": 16, "minibatch": 16, "epochs": 1, "lr": {"shape": "cosine", "start": 1e-3}},
    "dqn": {"buffer": 1000, "start": 32, "horizon": 16, "batch": 16},
    "sac": {"buffer": 1000, "start": 32, "horizon": 16, "batch": 16},
    "tqc": {"buffer": 1000, "start": 32, "horizon": 16, "batch": 16},
    "td3": {"buffer": 1000, "start": 32, "horizon": 16, "batch": 16},
    "crossq": {"buffer": 1000, "start": 32, "horizon": 16, "batch": 16},
}
# Values that a person may type by mistake, and some that only a program would.
VALUES = st.sampled_from(
    [
        *(None, True, False, "", "x", "null", "1e-3", "linear", "ppo", "CartPole-v1", "NoSuch-v0", "no_module:Env"),
        *(-1, 0, 1, 2, 3, 7, 0.5, 2.5, -0.0, float("nan"), float("inf"), 10**30, "10 steps", "5 bananas", "ünï"),
        *([], [1], ["x"], [[1]], {}, {"x": 1}, {"shape": "linear"}, {"start": 1}, [None], "${x}", "<<", 1e-320),
    ]
)


def base(name: str) -> dict[str, Any]:
    return {
        "kind": "control",
        "name": "fuzz",
        "env": {"id": "CartPole-v1", "num_envs": 2, "kwargs": {}, "clip_reward": 1.0, "vectorize": "sync"},
        "algorithm": {"name": name, **copy.deepcopy(ALGORITHMS[name])},
        "net": {"hidden": [8], "activation": "relu"},
        "train": {"frames": 64, "compile": "off"},
        "eval": {"episodes": 2, "num_envs": 2},
        "every": {"eval": "2 steps", "log": "1 step"},
        "seed": 0,
    }


def places(data: Any, path: tuple = ()) -> list[tuple]:
    """Every key and index in a spec."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [here for key in keys for here in [(*path, key), *places(data[key], (*path, key))]]


@st.composite
def broken(draw: st.DrawFn, least: int = 1) -> dict[str, Any]:
    """A valid spec with one to four keys deleted, misspelt, moved, added, or given another value."""
    data = base(draw(st.sampled_from(list(ALGORITHMS))))
    for _ in range(draw(st.integers(least, 4))):
        found = places(data)
        if not found:
            break
        *parents, key = draw(st.sampled_from(found))
        here = data
        for parent in parents:
            here = here[parent]
        match draw(st.sampled_from(["delete", "replace", "replace", "misspell", "add", "swallow"])):
            case "delete":
                del here[key]
            case "replace":
                here[key] = copy.deepcopy(draw(VALUES))
            case "misspell" if isinstance(here, dict):
                here[f"{key}s"] = here.pop(key)
            case "add" if isinstance(here, dict):
                name = draw(st.sampled_from(["gama", "x", "", "lr", "kind", "id", "1", "a.b"]))
                here[name] = copy.deepcopy(draw(VALUES))
            case "swallow":
                here[key] = [copy.deepcopy(here[key])]
    return data


def small(spec: ControlSpec) -> bool:
    """Whether a spec that is still valid can be run in a moment."""
    sizes = [spec.train.frames, spec.env.num_envs * 100, spec.eval.episodes * 50, spec.eval.num_envs * 50]
    sizes += [spec.frames_per_step, spec.updates, getattr(spec.algorithm, "buffer", 0), spec.max_session * 300]
    sizes += [10 * width for width in [*spec.net.hidden, *(spec.net.critic_hidden or [])]]
    return max(sizes) <= 1000 and spec.device != "cuda"


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=broken())
def test_check_broken_spec_passes_or_gives_an_error_of_ours(data):
    with suppress(PalestraError):
        palestra.check(data)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=broken(least=0), at=st.integers(0, 600), letter=st.sampled_from(list("{}[]:,-&*!|>'\"%@`#\t\n\x00é0a ")))
def test_check_broken_text_passes_or_gives_an_error_of_ours(tmp_path_factory, data, at, letter):
    path = tmp_path_factory.mktemp("fuzz") / "spec.yaml"
    text = yaml.safe_dump(data, allow_unicode=True)
    at = at % (len(text) + 1)
    path.write_text(text[:at] + letter + text[at + 1 :])
    with suppress(PalestraError):
        palestra.check(path)


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=broken())
def test_run_broken_spec_runs_or_gives_an_error_of_ours(tmp_path_factory, data):
    with suppress(PalestraError):
        spec = palestra.check(data).spec
        assert isinstance(spec, ControlSpec)
        if small(spec):
            palestra.run(data, root=tmp_path_factory.mktemp("runs"), quiet=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_check_unbroken_spec_passes(name):
    palestra.check(base(name))
