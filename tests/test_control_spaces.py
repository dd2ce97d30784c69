"""Spaces of every sort: packed and restored, through every algorithm or refused with a sentence, seen by networks."""

from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_envs import learner_on

from palestra.control.algorithms import ALGORITHMS, check_actions
from palestra.control.envs.make import make_single, make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate, play
from palestra.control.nets.trunks import PART_FEATURES, Parts, Trunk
from palestra.control.scaling import ObsScale
from palestra.control.spaces import ObsShape, PackedBox, flat_actions, observation_shape, packed, structured
from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec, EnvSpec
from palestra.spec.shape import NetSpec

torch.set_num_threads(1)

VECTOR = spaces.Box(-1, 1, (3,), np.float64)
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
OBSERVATIONS: dict[str, gym.Space] = {
    "vector": VECTOR,
    "matrix": spaces.Box(-1, 1, (2, 3), np.float32),
    "image": IMAGE,
    "discrete": spaces.Discrete(4, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"far": VECTOR, "near": spaces.Box(-1, 1, (2, 2)), "which": spaces.Discrete(3)}),
    "images": spaces.Dict({"camera": IMAGE, "wrist": IMAGE}),
    "mixed": spaces.Dict({"camera": IMAGE, "joints": VECTOR, "mode": spaces.MultiDiscrete([2, 2])}),
    "nested": spaces.Tuple((spaces.Dict({"a": VECTOR, "b": spaces.Discrete(2)}), spaces.MultiBinary([2, 2]))),
    "depth": spaces.Box(0, 5000, (4, 4), np.uint16),
}
ACTIONS: dict[str, gym.Space] = {
    "discrete": spaces.Discrete(3, start=2),
    "multi_discrete": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (2,), np.float32),
    "box_2d": spaces.Box(-2, 2, (2, 2), np.float64),
    "choices_2d": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "boxes": spaces.Dict({"arm": spaces.Box(-1, 3, (2,)), "hand": spaces.Box(0, 1, (1, 2))}),
    "choices": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 4]))),
    "bits": spaces.Dict({"a": spaces.MultiBinary(2), "b": spaces.MultiBinary(1)}),
    "number": spaces.Box(-2, 2, (), np.float32),
    "bits_in_a_tuple": spaces.MultiBinary((3,)),
}
KINDS = {"choices": "multi_discrete", "choices_2d": "multi_discrete", "bits": "multi_binary"}
KINDS |= {"box_2d": "box", "number": "box", "boxes": "box", "bits_in_a_tuple": "multi_binary"}
MIXTURE = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "press": spaces.Discrete(2)})
UNKNOWN = [spaces.Text(4), spaces.Sequence(VECTOR), spaces.Dict({"a": VECTOR, "words": spaces.Text(3)})]


class Anything(gym.Env):
    """Shows random observations of a space, asserts that actions are of another; episodes of five steps."""

    palestra_state = ("at", "np_random")

    def __init__(self, obs: gym.Space, actions: gym.Space):
        self.observation_space, self.action_space, self.at = obs, actions, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.at = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), action
        self.at += 1
        return self.observation_space.sample(), float(self.np_random.normal()), self.at == 5, False, {}

    def render(self) -> None:
        return None


def vector(obs: gym.Space, actions: gym.Space, count: int = 2, **given: Any) -> Any:
    spec = EnvSpec.model_validate({"id": "object:Anything", **given})
    return make_vector(spec, count, lambda: Anything(obs, actions))


def test_packed_observation_has_every_part_where_it_is_said_to_be():
    space = OBSERVATIONS["mixed"]
    env = make_single(EnvSpec(id="object:Anything"), lambda: Anything(space, spaces.Discrete(2)))
    assert isinstance(env.observation_space, PackedBox)
    parts = {part.path[0]: part for part in env.observation_space.parts}
    obs, _ = env.reset(seed=3)
    raw, _ = Anything(space, spaces.Discrete(2)).reset(seed=3)
    assert obs.dtype == np.float32
    np.testing.assert_array_equal(obs[parts["camera"].start : parts["camera"].stop], raw["camera"].ravel())
    np.testing.assert_array_equal(obs[parts["joints"].start : parts["joints"].stop], raw["joints"].astype(np.float32))
    hot = np.concatenate([np.eye(2)[choice] for choice in raw["mode"]])
    np.testing.assert_array_equal(obs[parts["mode"].start : parts["mode"].stop], hot)


def test_packed_observation_of_images_alone_stays_bytes():
    env = make_single(EnvSpec(id="object:Anything"), lambda: Anything(OBSERVATIONS["images"], spaces.Discrete(2)))
    assert env.reset(seed=0)[0].dtype == np.uint8


@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "dict", "mixed", "nested"])
def test_packed_batch_equals_its_rows(name):
    env = make_single(EnvSpec(id="object:Anything"), lambda: Anything(OBSERVATIONS[name], spaces.Discrete(2)))
    parts, raw = env.observation_space.parts, [env.unwrapped.observation_space.sample() for _ in range(3)]

    def stacked(leaves: list[Any]) -> Any:
        if isinstance(leaves[0], dict):
            return {key: stacked([leaf[key] for leaf in leaves]) for key in leaves[0]}
        if isinstance(leaves[0], tuple):
            return tuple(stacked(list(part)) for part in zip(*leaves, strict=True))
        return np.stack(leaves)

    np.testing.assert_array_equal(packed(parts, stacked(raw)), np.stack([packed(parts, one) for one in raw]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10_000))
def test_structured_action_of_any_vector_is_in_the_environments_space_and_round_trips(name, seed):
    space = ACTIONS[name]
    flat = flat_actions(space)
    if flat is space:
        return
    flat.seed(seed)
    sampled = flat.sample()
    action = structured(flat.form, sampled)
    assert space.contains(action)
    parts = list(action.values()) if isinstance(action, dict) else action if isinstance(action, tuple) else [action]
    inner = [np.ravel(part) for part in parts]
    np.testing.assert_array_equal(np.concatenate(inner).astype(sampled.dtype), sampled)
    batch = structured(flat.form, np.stack([sampled, sampled]))
    first = batch[next(iter(batch))] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
    assert len(first) == 2


def spec_of(name: str, **given: Any) -> ControlSpec:
    return ControlSpec.model_validate(
        {
            "kind": "control",
            "name": "spaces",
            "env": {"id": "x"},
            "algorithm": {"name": name, **given},
            "train": {"frames": 100},
        }
    )


SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"horizon": 12, "minibatch": 24},
    "a2c": {"horizon": 12},
    "reinforce": {"horizon": 12},
    "sarsa": {"horizon": 12},
    **{name: {"horizon": 12, "start": 12, "batch": 8, "buffer": 64} for name in ("dqn", "sac", "tqc", "td3", "crossq")},
}
EVERY = [*product(SMALL, OBSERVATIONS, ["discrete", "box"]), *product(SMALL, ["vector"], ACTIONS)]
# Every sort of space once, each with another algorithm.
FEW = [(list(SMALL)[i % len(SMALL)], obs, ["discrete", "box"][i % 2]) for i, obs in enumerate([*OBSERVATIONS, "mixed"])]
FEW += [(name, "vector", actions) for i, actions in enumerate(ACTIONS) for name in (list(SMALL)[i % len(SMALL)], "ppo")]
FEW += [("dqn", "mixed", "discrete"), ("sac", "mixed", "box"), ("dqn", "depth", "discrete")]


@pytest.mark.parametrize(("name", "obs", "actions"), fast_only(dict.fromkeys([*EVERY, *FEW]), *FEW))
def test_space_of_every_sort_is_trained_and_evaluated_in_or_refused_with_a_sentence(name, obs, actions):
    """The environment asserts that it is given actions of its own space."""
    env = vector(OBSERVATIONS[obs], ACTIONS[actions])
    kind = KINDS.get(actions, actions)
    if kind not in ALGORITHMS[name].supports:
        head = learner_on(env, "ppo", **SMALL["ppo"]).policy.head
        with pytest.raises(UsageError, match=f"{name} acts in spaces of type .* one of type {kind}: use "):
            check_actions(spec_of(name), head)
        return
    learner = learner_on(env, name, net={"hidden": [8]}, given={"normalize_obs": True}, **SMALL[name])
    for _ in range(2):
        assert np.isfinite(list(learner.step(0.0).values())).all()
    evaluate(learner.policy, Stepper(vector(OBSERVATIONS[obs], ACTIONS[actions])), 3, seed=1)
    # And by hand, with what the environment itself gives and takes.
    play(learner.policy, Anything(OBSERVATIONS[obs], ACTIONS[actions]), 1, seed=2)


@pytest.mark.parametrize("obs", UNKNOWN)
def test_observation_space_that_is_not_an_array_is_refused_and_named(obs):
    with pytest.raises(UsageError, match="is not supported: wrap the environment"):
        vector(obs, spaces.Discrete(2))


def test_action_space_of_numbers_and_choices_is_refused_and_says_what_could_be_done():
    with pytest.raises(UsageError, match="its parts are Box, Discrete; use parts that are all Box of floats, or all"):
        vector(VECTOR, MIXTURE)


def test_vectorized_environment_with_a_dict_is_refused_with_a_way_out():
    with pytest.raises(UsageError, match="use `vectorize: sync` or `async`"):
        observation_shape(OBSERVATIONS["dict"])


def test_trunk_of_parts_scales_images_and_passes_every_part_on():
    torch.manual_seed(0)
    space = make_single(
        EnvSpec(id="object:A"), lambda: Anything(OBSERVATIONS["mixed"], spaces.Discrete(2))
    ).observation_space
    shape = observation_shape(space)
    trunk = Trunk(shape, NetSpec(hidden=[16]))
    assert isinstance(trunk.front, Parts)
    assert trunk.front.size == PART_FEATURES + 3 + 4
    camera = shape.parts[0]
    obs = torch.rand(2, *shape)
    obs[:, camera.start : camera.stop] = torch.randint(0, 256, (2, camera.stop - camera.start)).float()
    pixels = (obs[:, camera.start : camera.stop] / 255).unflatten(1, camera.shape)
    features = trunk.front(obs)
    torch.testing.assert_close(features[:, :PART_FEATURES], trunk.front.fronts[0](pixels))
    torch.testing.assert_close(features[:, PART_FEATURES:], obs[:, camera.stop :])
    for part in shape.parts:  # the output depends on each
        moved = obs.clone()
        moved[:, part.start : part.stop] += 1
        assert not torch.equal(trunk(moved), trunk(obs))


def test_trunk_named_for_images_without_any_among_the_parts_is_refused():
    shape = observation_shape(
        make_single(EnvSpec(id="object:A"), lambda: Anything(OBSERVATIONS["dict"], VECTOR)).observation_space
    )
    with pytest.raises(UsageError, match="nature takes images"):
        Trunk(shape, NetSpec(trunk="nature"))


def test_obs_scale_of_parts_normalizes_numbers_and_leaves_pixels():
    shape = observation_shape(
        make_single(EnvSpec(id="object:A"), lambda: Anything(OBSERVATIONS["mixed"], VECTOR)).observation_space
    )
    scale = ObsScale(shape, 10.0)
    obs = torch.rand(64, *shape) * 100 + 7
    scale.update(obs)
    out, camera = scale(obs), shape.parts[0]
    torch.testing.assert_close(out[:, camera.start : camera.stop], obs[:, camera.start : camera.stop])
    torch.testing.assert_close(out[:, camera.stop :].mean(0), torch.zeros(7), atol=1e-4, rtol=0)
    assert "pixels" not in scale.state_dict()


@pytest.mark.parametrize("obs", ["vector", "dict", "mixed"])
def test_frame_stack_of_vectors_and_parts_is_learned_from(obs):
    env = vector(OBSERVATIONS[obs], ACTIONS["discrete"], frame_stack=3)
    given = {"frame_stack": 3, "normalize_obs": True}
    learner = learner_on(env, "dqn", given=given, net={"hidden": [8]}, **SMALL["dqn"])
    learner.step(0.0)
    assert learner.policy.obs_shape[0] == 3
    if obs == "mixed":
        front = learner.net.trunk.front
        assert isinstance(front, Parts)
        assert front.size == PART_FEATURES + 3 * (3 + 4)  # the channels of stacked images are those of one


def test_policy_state_of_parts_and_form_acts_the_same_when_restored():
    learner = learner_on(vector(OBSERVATIONS["mixed"], ACTIONS["boxes"]), "ppo", net={"hidden": [8]}, **SMALL["ppo"])
    state = learner.policy.state()
    shape = ObsShape.of(state["obs_shape"], state["parts"])
    assert shape.parts == learner.policy.obs_shape.parts
    obs = OBSERVATIONS["mixed"].sample()
    action = learner.policy.act(obs)
    assert ACTIONS["boxes"].contains(action)
    with pytest.raises(UsageError, match="with the parts camera, joints, mode"):
        learner.policy.act({"camera": obs["camera"]})


def test_as_many_choices_as_there_are_in_the_space_are_a_batch():
    learner = learner_on(vector(OBSERVATIONS["discrete"], ACTIONS["discrete"]), "ppo", **SMALL["ppo"])
    torch.nn.init.normal_(learner.net.policy_head.weight)
    each = [learner.policy.act(choice) for choice in range(-1, 3)]
    assert learner.policy.act(np.arange(-1, 3)).tolist() == each


def test_state_round_trip_with_parts_and_a_structured_action_continues_identically():
    def made() -> Any:
        env = vector(OBSERVATIONS["dict"], ACTIONS["boxes"])
        return learner_on(env, "sac", net={"hidden": [8]}, given={"normalize_obs": True}, **SMALL["sac"])

    going = made()
    going.step(0.0)
    state, generator = going.state(), going.generator.get_state()
    expected = [going.step(0.0) for _ in range(2)]
    resumed = made()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.0) for _ in range(2)] == expected
