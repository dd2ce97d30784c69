"""The compiled updates of A2C and of self-imitation compute what the eager ones do, with scales, masks and Beta."""

import shutil
from typing import Any

import pytest
import torch
from on_policy_envs import Forbidding, Target
from probe_envs import learner_on, sync

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler"),
]

IMITATION = {"buffer": 200, "batch": 16, "updates": 2}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "masks": (Forbidding, "ppo", {"minibatch": 32, "self_imitation": IMITATION}),
    "beta": (Target, "a2c", {"distribution": "beta"}),
    "gaussian": (Target, "a2c", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_eager_and_compiled_are_close(case):
    env, name, spec = CASES[case]
    found = []
    for compile in (False, True):
        given = {"normalize_obs": True, "normalize_reward": True}
        net = {"hidden": [16]}
        learner = learner_on(sync(env, 4), name, compile=compile, horizon=16, net=net, given=given, seed=1, **spec)
        rows = [learner.step(0.0) for _ in range(4)]  # the scale of observations moves after each
        found.append((rows, learner.flat.vector.clone()))
    (eager, vector), (compiled, other) = found
    for one, two in zip(eager, compiled, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(other, vector, rtol=1e-3, atol=1e-4)
