"""States of environments: restored into fresh environments, everything that follows is equal bit for bit."""

import importlib.util
import json
import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, NormalizeReward, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.control.envs.classic import CartPoleVector
from palestra.control.envs.snapshot import (
    NotPlain,
    Snapshot,
    decode,
    encode,
    restore_vector,
    vector_exactness,
    vector_state,
)
from palestra.control.envs.vector import copies
from palestra.errors import UsageError
from palestra.runs.tree import flatten, unflatten

if importlib.util.find_spec("ale_py"):
    import ale_py

    gymnasium.register_envs(ale_py)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore::DeprecationWarning")

# environment id, arguments of make, the package it needs, how many steps to compare after a cut
CASES = [
    ("CartPole-v1", {"max_episode_steps": 45}, None, 120),
    ("Acrobot-v1", {"max_episode_steps": 45}, None, 120),
    ("Pendulum-v1", {"max_episode_steps": 45}, None, 120),
    ("MountainCar-v0", {"max_episode_steps": 45}, None, 120),
    ("Taxi-v4", {"max_episode_steps": 45, "fickle_passenger": True}, None, 120),
    ("FrozenLake-v1", {}, None, 120),
    ("Blackjack-v1", {}, None, 120),
    ("LunarLander-v3", {"enable_wind": True}, "Box2D", 120),
    ("LunarLander-v3", {"continuous": True, "max_episode_steps": 60}, "Box2D", 120),
    ("BipedalWalker-v3", {"max_episode_steps": 60}, "Box2D", 120),
    ("HalfCheetah-v5", {"max_episode_steps": 60}, "mujoco", 120),
    ("Reacher-v5", {}, "mujoco", 120),
    ("Ant-v5", {"max_episode_steps": 60}, "mujoco", 80),
    ("Humanoid-v5", {}, "mujoco", 80),
    ("Pusher-v5", {"max_episode_steps": 60}, "mujoco", 80),
    ("ALE/Pong-v5", {"max_num_frames_per_episode": 90, "obs_type": "grayscale"}, "ale_py", 30),
    (
        "ALE/Breakout-v5",
        {"max_num_frames_per_episode": 90, "obs_type": "ram", "frameskip": (2, 5)},
        "ale_py",
        30,
    ),
]
# Those of MuJoCo are saved alike, and so are Atari's games, which take a third of a second to load.
LONG = ("HalfCheetah-v5", "Ant-v5", "Pusher-v5", "ALE/Pong-v5")
CASES = [pytest.param(*case, id=case[0], marks=pytest.mark.slow if case[0] in LONG else ()) for case in CASES]


def maker(name: str, kwargs: dict[str, Any], package: str | None = None):
    if package is not None:
        pytest.importorskip(package, reason=f"{name} needs {package}")

    def make() -> Snapshot:
        env = gymnasium.make(name, **kwargs)
        box = isinstance(env.observation_space, gymnasium.spaces.Box)
        return Snapshot(env if box else gymnasium.wrappers.FlattenObservation(env))

    return make


def vector(make, num_envs=2, processes=0):
    return copies("copies", [make] * num_envs, processes, 60.0)


def bits(value: Any) -> Any:
    """A step's results so that == means bit for bit; wall-clock times, which cannot repeat, left out."""
    if isinstance(value, dict):
        if "_final_obs" in value:  # the rows of running episodes are not set
            value = {**value, "final_obs": value["final_obs"][value["_final_obs"]]}
        return {key: bits(item) for key, item in value.items() if key not in ("t", "_t")}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [bits(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, tuple | list):
        return [bits(item) for item in value]
    return repr(value)


def assert_plain(tree: Any) -> None:
    if isinstance(tree, dict):
        assert all(type(key) is str for key in tree)
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            assert_plain(item)
    elif isinstance(tree, np.ndarray):
        assert tree.dtype.kind in "biuf"
    else:
        assert tree is None or type(tree) in (str, int, float, bool, bytes)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two states are equal bit for bit: NaN equals NaN, 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b) if isinstance(a, float) else a == b


def stored(state: Any) -> Any:
    """The state as it comes back from a checkpoint on disk."""
    tree, leaves = flatten(state)
    return unflatten(json.loads(json.dumps(tree)), {leaf.key: leaf.carrier for leaf in leaves})


def assert_continues(make_vector, follow: int, seed: int) -> None:
    """Record a run, taking states at a few points; continue fresh environments from each; compare what follows."""
    rng = np.random.default_rng(seed)
    plain, recorded = make_vector(), make_vector()
    for env in (plain, recorded):
        env.reset(seed=seed)
        env.action_space.seed(seed)
    trace, actions, states = [], [], {0: vector_state(recorded)}
    cuts, first_end, step = {int(rng.integers(1, 60))}, None, 0
    while first_end is None or step < max(cuts) + follow:
        step += 1
        actions.append(recorded.action_space.sample())
        result = recorded.step(actions[-1])
        trace.append(bits(result))
        # what taking states changed would show here
        assert trace[-1] == bits(plain.step(plain.action_space.sample()))
        if first_end is None and (result[2].any() or result[3].any()):
            first_end = step
            cuts |= {step, step + 1}
        if step in cuts:
            states[step] = vector_state(recorded)
            assert same_bits(states[step], vector_state(recorded))
    for cut, state in states.items():
        assert_plain(state)
        state = stored(state)
        fresh = make_vector()
        fresh.reset(seed=seed + 1000)
        for _ in range(cut % 7):
            fresh.step(fresh.action_space.sample())
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert restore_vector(fresh, state) is None
        assert same_bits(state, vector_state(fresh))
        for step in range(cut, cut + follow):
            assert bits(fresh.step(actions[step])) == trace[step], f"cut {cut}, step {step}"
        fresh.close()
    plain.close()
    recorded.close()


@pytest.mark.parametrize(("name", "kwargs", "package", "follow"), CASES)
def test_restore_fresh_envs_continue_bit_for_bit(name, kwargs, package, follow):
    make = maker(name, kwargs, package)
    num_envs = 1 if package == "ale_py" else 2  # loading a game takes a third of a second
    assert_continues(lambda: vector(make, num_envs), follow, seed=3)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**31), limit=st.integers(1, 30))
def test_restore_any_seed_and_episode_length_continues_bit_for_bit(seed, limit):
    make = maker("CartPole-v1", {"max_episode_steps": limit})
    assert_continues(lambda: vector(make, 3), follow=30, seed=seed)


@pytest.mark.parametrize(
    ("name", "kwargs", "package"),
    [
        ("Pendulum-v1", {"max_episode_steps": 20}, None),
        ("LunarLander-v3", {"max_episode_steps": 20}, "Box2D"),
        ("Reacher-v5", {"max_episode_steps": 20}, "mujoco"),
    ],
)
def test_restore_fresh_processes_continue_bit_for_bit(name, kwargs, package):
    make = maker(name, kwargs, package)
    assert_continues(lambda: vector(make, processes=2), follow=45, seed=5)


def test_restore_cartpole_vector_continues_bit_for_bit():
    assert vector_exactness(CartPoleVector(3)) is None
    assert_continues(lambda: CartPoleVector(3, max_episode_steps=20), follow=60, seed=1)


def wrapped(name: str, **kwargs):
    env = RecordEpisodeStatistics(gymnasium.make(name, **kwargs))
    return Snapshot(NormalizeReward(FrameStackObservation(NormalizeObservation(env), 3)))


def test_restore_wrappers_with_state_around_cartpole_continue_bit_for_bit():
    assert_continues(lambda: vector(lambda: wrapped("CartPole-v1")), follow=100, seed=2)


def test_restore_wrappers_with_state_around_replayed_env_continue_bit_for_bit():
    pytest.importorskip("Box2D")
    assert_continues(lambda: vector(lambda: wrapped("LunarLander-v3", max_episode_steps=40)), follow=100, seed=2)


def test_restore_atari_sticky_actions_repeat_the_action_in_force():
    pytest.importorskip("ale_py")
    # one frame a step: at many of the cuts the next frame repeats an action that the ALE does not save
    make = maker("ALE/Pong-v5", {"frameskip": 1, "obs_type": "ram", "repeat_action_probability": 0.6})
    env, fresh = make(), make()
    env.reset(seed=3)
    env.action_space.seed(0)
    for cut in range(5):  # each loads the game again
        assert fresh.set_state(env.get_state())
        for _ in range(5 + cut % 3):
            action = env.action_space.sample()
            assert bits(fresh.step(action)) == bits(env.step(action)), f"cut {cut}"


def test_restore_atari_preprocessing_continues_bit_for_bit():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2", reason="AtariPreprocessing needs OpenCV")

    def make():
        env = gymnasium.make("ALE/Pong-v5", frameskip=1, max_num_frames_per_episode=90)
        return Snapshot(FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4))

    assert_continues(lambda: vector(make, 1), follow=30, seed=2)


@pytest.mark.parametrize(
    ("name", "package"), [("LunarLander-v3", "Box2D"), ("Reacher-v5", "mujoco"), ("ALE/Pong-v5", "ale_py")]
)
def test_set_state_where_pickle_comes_back_fresh_is_in_the_episode(name, package):
    pytest.importorskip(package)
    env, fresh = Snapshot(gymnasium.make(name)), Snapshot(gymnasium.make(name))
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(20):
        env.step(env.action_space.sample())
    by_pickle = pickle.loads(pickle.dumps(env.env))
    assert fresh.set_state(env.get_state())
    action = env.action_space.sample()
    expected = bits(env.step(action))
    assert bits(fresh.step(action)) == expected
    by_pickle.unwrapped.reset(seed=0)
    assert bits(by_pickle.step(action)) != expected


class Walk(gymnasium.Env):
    """A random walk on the line; subclasses say, or do not say, what its state is."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal()
        self.resource = object()
        return np.array([self.position]), {}

    def step(self, action):
        self.position += (1 if action else -1) * self.np_random.random()
        return np.array([self.position]), float(action), abs(self.position) > 5, False, {}


class DeclaredWalk(Walk):
    palestra_state = ("position", "np_random")


class BadlyDeclaredWalk(Walk):
    palestra_state = ("resource",)


class UnsavableWalk(Walk):
    palestra_state = None


class TiredWalk(Walk):
    """Its steps depend on the clock of the machine: nothing can repeat them."""

    clock = 0

    def step(self, action):
        TiredWalk.clock += 1
        self.position += TiredWalk.clock
        return np.array([self.position]), 0.0, False, False, {}


@pytest.mark.parametrize(("kind", "expected"), [(Walk, "replay"), (DeclaredWalk, "attributes")])
def test_restore_own_environment_continues_bit_for_bit(kind, expected):
    env = Snapshot(kind())
    env.reset(seed=0)
    assert env.get_state()["kind"] == expected
    assert_continues(lambda: vector(lambda: Snapshot(kind())), follow=60, seed=0)


def test_restore_replayed_env_reset_without_a_seed_continues_bit_for_bit():
    env, fresh = Snapshot(Walk()), Snapshot(Walk())
    env.reset()
    for action in (1, 0, 1):
        env.step(action)
    assert fresh.set_state(env.get_state())
    assert bits(fresh.step(1)) == bits(env.step(1))


def test_reset_declared_attribute_not_plain_is_refused_by_name():
    with pytest.raises(UsageError, match=r"BadlyDeclaredWalk lists 'resource'.*palestra_state = None"):
        Snapshot(BadlyDeclaredWalk()).reset()


@pytest.mark.parametrize("kind", [UnsavableWalk, TiredWalk])
def test_restore_env_that_cannot_continue_warns_once_and_restarts(kind):
    env, fresh = (vector(lambda: Snapshot(kind()), 3) for _ in range(2))
    env.reset(seed=0)
    env.step(np.array([0, 1, 1]))
    state = vector_state(env)
    with pytest.warns(UserWarning, match="copies could not be restored") as record:
        restarted = restore_vector(fresh, state)
    assert len(record) == 1
    assert restarted is not None
    assert restarted.which.all()
    np.testing.assert_array_equal(restarted.observations, fresh.observations)
    # the new episodes come from the restored generators: a second resume from the same state gives the same ones
    again = vector(lambda: Snapshot(kind()), 3)
    with pytest.warns(UserWarning, match="restart"):
        np.testing.assert_array_equal(restore_vector(again, state).observations, restarted.observations)


def test_restore_some_envs_restart_others_go_on():
    kinds = [DeclaredWalk, UnsavableWalk]
    env, fresh = (copies("walks", [lambda kind=kind: Snapshot(kind()) for kind in kinds], 0, 60.0) for _ in range(2))
    env.reset(seed=0)
    observations, *_ = env.step(np.array([0, 1]))
    with pytest.warns(UserWarning, match="restart"):
        restarted = restore_vector(fresh, vector_state(env))
    assert restarted.which.tolist() == [False, True]
    assert restarted.observations[1] != observations[1]


def test_exactness_env_that_opts_out_says_so_in_one_sentence():
    sentence = "UnsavableWalk has no way to save its state: after a resume its running episodes restart."
    assert Snapshot(UnsavableWalk()).exactness == sentence
    assert vector_exactness(vector(lambda: Snapshot(UnsavableWalk()))) == sentence
    assert Snapshot(DeclaredWalk()).exactness is None
    assert Snapshot(Walk()).exactness is None


def test_restore_vector_env_without_adapter_warns_and_restarts():
    env, fresh = (gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point") for _ in range(2))
    assert "no way to save its state" in vector_exactness(env)
    env.reset(seed=0)
    state = vector_state(env)
    assert_plain(state)
    with pytest.warns(UserWarning, match="CartPoleVectorEnv"):
        assert restore_vector(fresh, state).which.all()


class Memo(gymnasium.Wrapper):
    """Holds changing state that is not plain data."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = {1.5}

    def step(self, action):
        observation, *rest = self.env.step(action)
        self.seen.add(float(observation[0]))
        return (observation, *rest)


def test_get_state_wrapper_with_state_not_plain_replays_instead():
    def make():
        return Snapshot(Memo(DeclaredWalk()))

    env = make()
    env.reset(seed=0)
    assert env.get_state()["kind"] == "replay"
    assert_continues(lambda: vector(make), follow=60, seed=0)


def test_get_state_something_not_plain_appears_late_falls_back_to_restart():
    env, fresh = (Snapshot(gymnasium.wrappers.TimeLimit(DeclaredWalk(), 9)) for _ in range(2))
    env.reset(seed=0)
    env.env.late = object()
    assert not fresh.set_state(env.get_state())
    assert fresh.restart is not None


def test_restore_after_rendering_continues_bit_for_bit():
    pytest.importorskip("pygame")
    env, fresh = (Snapshot(gymnasium.make("CartPole-v1", render_mode="rgb_array")) for _ in range(2))
    env.reset(seed=0)
    env.render()
    env.step(1)
    assert fresh.set_state(env.get_state())
    assert bits(fresh.step(0)) == bits(env.step(0))
    np.testing.assert_array_equal(fresh.render(), env.render())


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (lambda: vector(maker("CartPole-v1", {}), 3), "of 2 environments"),
        (lambda: vector(maker("Pendulum-v1", {})), "CartPole-v1, it cannot be continued by Pendulum-v1"),
        (lambda: vector(lambda: wrapped("CartPole-v1")), "other wrappers"),
        (lambda: CartPoleVector(2), "another kind"),
    ],
)
def test_restore_state_of_something_else_is_refused(make_other, message):
    env = vector(maker("CartPole-v1", {}))
    env.reset(seed=0)
    other = make_other()
    other.reset(seed=0)
    with pytest.raises(UsageError, match=message):
        restore_vector(other, vector_state(env))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.floats(width=32).map(np.float32)
    | st.integers(0, 9).map(np.int64)
    | st.lists(st.floats(), max_size=3).map(np.array)
    | st.lists(st.text(min_size=1, max_size=2), min_size=1, max_size=2).map(np.array),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_decode_of_encode_gives_the_value_with_types_and_bits(value):
    tree = encode(value)
    assert_plain(tree)
    back = decode(tree)
    assert bits(back) == bits(value)
    assert type(back) is type(value)
    assert same_bits(encode(back), tree)


@pytest.mark.parametrize("value", [object(), {1}, np.array([None]), [object()], ValueError()])
def test_encode_not_plain_raises(value):
    with pytest.raises(NotPlain):
        encode(value)


@pytest.mark.parametrize("bit_generator", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_decode_generator_continues_its_stream(bit_generator):
    generator = np.random.Generator(bit_generator(7))
    generator.random(5)
    tree = encode(generator)
    assert_plain(tree)
    copy = decode(tree)
    expected = generator.random(4)
    np.testing.assert_array_equal(copy.random(4), expected)
    in_place = np.random.Generator(bit_generator(8))
    assert decode(tree, in_place) is in_place
    np.testing.assert_array_equal(in_place.random(4), expected)


class ReusesItsArray(gymnasium.Env):
    """Writes every observation into one array of its own: 1, 2, 3 (terminated), and 0 at a reset."""

    observation_space = gymnasium.spaces.Box(-10, 10, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.array = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.array[:] = 0
        return self.array, {}

    def step(self, action):
        self.array += 1
        return self.array, 0.0, bool(self.array[0] == 3), False, {}


def test_final_observation_of_an_environment_that_reuses_its_array_is_not_the_reset_one():
    venv = vector(lambda: Snapshot(ReusesItsArray()), 1)
    venv.reset(seed=0)
    for _ in range(3):
        observations, _, terminated, _, infos = venv.step(np.zeros(1, int))
    assert terminated[0]
    assert infos["final_obs"][0] == 3
    assert observations[0] == 0


def test_state_that_an_older_version_saved_is_refused_in_a_sentence():
    with pytest.raises(UsageError, match="saved by an older version: start a new run"):
        restore_vector(vector(lambda: Snapshot(gymnasium.make("CartPole-v1")), 1), {"kind": "copies", "spaces": []})
