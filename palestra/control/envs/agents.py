"""Parallel environments of PettingZoo: every agent of every game is a row of the vector.

One policy acts for all; with `env.policies` an agent's observation ends in which of them it is, one-hot, and
`palestra.control.nets.agents` has networks for each.
Agents are alike: they have equal spaces and end together, as in most cooperative games; SuperSuit's wrappers
`pad_observations_v0`, `pad_action_space_v0` and `black_death_v3` make others so. A frame is one step of one agent.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.errors import MissingExtra, UsageError
from palestra.spec.imports import import_named
from palestra.spec.kinds.control import PETTINGZOO, EnvSpec

Game = Any
"""A `pettingzoo.ParallelEnv`, or what has its methods."""


def make_game(spec: EnvSpec, **kwargs: Any) -> Game:
    """The game of `pettingzoo:module`, by the module's `parallel_env`, or of `pettingzoo:module:function`."""
    module, _, name = spec.id.removeprefix(PETTINGZOO).partition(":")
    try:
        make = getattr(import_named(module, "env.id"), name or "parallel_env", None)
    except UsageError as error:
        if not module.startswith("pettingzoo"):
            raise
        raise MissingExtra(f"{spec.id} ({error})", "pettingzoo") from error
    if not callable(make):
        what = name or "parallel_env"
        raise UsageError(f"env.id: {module} has no function {what!r} that makes a parallel environment of PettingZoo")
    given: dict[str, Any] = {**spec.kwargs, **kwargs}
    try:
        game = make(**given)
    except TypeError as error:
        raise UsageError(f"env: {spec.id} could not be made with {given}: {error}") from error
    missing = [name for name in ("possible_agents", "observation_space", "action_space") if not hasattr(game, name)]
    if missing:
        raise UsageError(f"env.id: {spec.id} makes a {type(game).__name__} without {missing[0]}: not a parallel one")
    _alike(spec.id, game)
    if spec.policies not in (1, len(game.possible_agents)):
        count = len(game.possible_agents)
        raise UsageError(f"env.policies: expected 1 or {count}, the number of agents of {spec.id}; got {spec.policies}")
    return game


def _alike(name: str, game: Game) -> None:
    for what in (game.observation_space, game.action_space):
        kinds = {str(what(agent)): agent for agent in game.possible_agents}
        if len(kinds) > 1:
            differ = " and ".join(f"{agent}: {space}" for space, agent in list(kinds.items())[:2])
            raise UsageError(f"{name}: agents of one policy need equal spaces, got {differ}; pad them with SuperSuit")
    if not isinstance(space := game.observation_space(game.possible_agents[0]), spaces.Box):
        raise UsageError(f"{name}: agents must observe a Box, got {space}; flatten it with SuperSuit")


class Agents(VectorEnv):
    """Games side by side: row g · A + a is agent a of game g, reset in the step in which its game ends."""

    def __init__(self, name: str, games: Sequence[Game], *, marked: bool = False):
        self.name, self.games, self.agents = name, list(games), list(games[0].possible_agents)
        self.marked = marked
        self.num_envs = len(self.games) * len(self.agents)
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = _space(games[0], marked)
        self.single_action_space = games[0].action_space(self.agents[0])
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin all games; game g gets `seed + g`."""
        begun = [game.reset(seed=None if seed is None else seed + g)[0] for g, game in enumerate(self.games)]
        return np.concatenate([self._rows(obs) for obs in begun]), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all games; the last observations of those that ended are in `final_obs`."""
        columns, count = [], len(self.agents)
        for g, game in enumerate(self.games):
            own = actions[g * count : (g + 1) * count]
            obs, rewards, terminated, truncated = step_game(self.name, game, self.agents, own)
            final = self._rows(obs)
            ended = bool((terminated | truncated).all())
            columns.append((self._rows(game.reset()[0]) if ended else final, rewards, terminated, truncated, final))
        obs, rewards, terminated, truncated, final = (np.concatenate(column) for column in zip(*columns, strict=True))
        ended = terminated | truncated
        infos = {"final_obs": final, "_final_obs": ended} if ended.any() else {}
        return obs, rewards, terminated, truncated, infos

    def _rows(self, by_agent: dict[Any, Any]) -> np.ndarray:
        return rows_of(by_agent, self.agents, self.marked)

    def close_extras(self, **kwargs: Any) -> None:
        """Close all games."""
        for game in self.games:
            game.close()


def rows_of(by_agent: dict[Any, Any], agents: Sequence[Any], marked: bool) -> np.ndarray:
    """Observations as rows; `marked` ones end in which agent it is."""
    rows = np.stack([np.asarray(by_agent[agent]) for agent in agents])
    return np.concatenate([rows, np.eye(len(agents), dtype=rows.dtype)], axis=1) if marked else rows


def _space(game: Game, marked: bool) -> spaces.Box:
    space, count = game.observation_space(game.possible_agents[0]), len(game.possible_agents)
    if not marked:
        return space
    if len(space.shape) != 1:
        raise UsageError(f"env.policies: expected 1, because agents observe arrays of shape {space.shape}")
    low, high = (np.concatenate([end, np.full(count, i, end.dtype)]) for i, end in enumerate((space.low, space.high)))
    return spaces.Box(low, high, dtype=space.dtype.type)


def step_game(name: str, game: Game, agents: Sequence[Any], actions: Any) -> tuple[dict, np.ndarray, Any, Any]:
    """Observations by agent, and rewards, terminations and truncations as arrays; agents must end together."""
    obs, rewards, terminated, truncated, _ = game.step(dict(zip(agents, actions, strict=True)))
    over = {agent: terminated.get(agent, True) or truncated.get(agent, True) for agent in agents}
    if any(over.values()) and not all(over.values()):
        first = next(agent for agent, ended in over.items() if ended)
        raise UsageError(f"{name}: {first} has ended before the others; wrap the game in SuperSuit's black_death_v3")
    columns = (np.array([by_agent[agent] for agent in agents]) for by_agent in (rewards, terminated, truncated))
    return obs, *columns


class WholeGame(gym.Env):
    """One game to watch: its observation and its action are those of all agents, its reward is their mean."""

    def __init__(self, name: str, game: Game, *, marked: bool = False):
        self.name, self.game, self.agents, self.marked = name, game, list(game.possible_agents), marked
        self.observation_space = _space(game, marked)
        self.action_space = game.action_space(self.agents[0])
        self.metadata = getattr(game, "metadata", {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin the game."""
        obs, _ = self.game.reset(seed=seed)
        return rows_of(obs, self.agents, self.marked), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Step with the actions of all agents."""
        obs, rewards, terminated, truncated = step_game(self.name, self.game, self.agents, action)
        shown = rows_of(obs, self.agents, self.marked)
        return shown, float(rewards.mean()), bool(terminated.all()), bool(truncated.all()), {}

    def render(self) -> Any:
        """A picture of the game."""
        return self.game.render()

    def close(self) -> None:
        """Close the game."""
        self.game.close()


def games(spec: EnvSpec, rows: int, *, at_most: bool = False) -> Agents:
    """Games with `rows` agents in all; `at_most`: as many whole games as fit, at least one."""
    first = make_game(spec)
    count = len(first.possible_agents)
    if rows % count and not at_most:
        raise UsageError(f"env.num_envs: expected a multiple of the {count} agents of {spec.id}, got {rows}")
    more = [make_game(spec) for _ in range(max(1, rows // count) - 1)]
    return Agents(spec.id, [first, *more], marked=spec.policies > 1)


class Meeting:
    """Agents on a square who are paid for coming together: a small parallel environment, in PettingZoo's form.

    An agent sees where it is and where the others are from it. It stays or goes a tenth in one of four directions. All
    get minus the mean distance between two of them.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    MOVES = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]) / 10

    def __init__(self, agents: int = 3, steps: int = 25, render_mode: str | None = None):
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.agents, self.steps, self.t, self.render_mode = self.possible_agents, steps, 0, render_mode
        self.places, self.random = np.zeros((agents, 2)), np.random.default_rng()

    def observation_space(self, agent: str) -> gym.Space:
        """Own place, and where each other agent is from there."""
        return spaces.Box(-2, 2, (2 * len(self.possible_agents),), np.float32)

    def action_space(self, agent: str) -> gym.Space:
        """Stay, or one of four directions."""
        return spaces.Discrete(5)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, dict]]:
        """All agents at random places."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.t, self.places = 0, self.random.uniform(-1, 1, self.places.shape)
        return self._seen(), {agent: {} for agent in self.possible_agents}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        """All move at once."""
        moves = self.MOVES[[int(actions[agent]) for agent in self.possible_agents]]
        self.t, self.places = self.t + 1, np.clip(self.places + moves, -1, 1)
        apart = np.linalg.norm(self.places[:, None] - self.places[None], axis=-1)
        count = len(self.possible_agents)
        reward = -float(apart.sum() / max(1, count * (count - 1)))
        columns = (reward, False, self.t >= self.steps, {})
        return self._seen(), *(dict.fromkeys(self.possible_agents, value) for value in columns)

    def render(self) -> np.ndarray:
        """The square from above, a dot for each agent."""
        picture = np.full((128, 128, 3), 255, np.uint8)
        for i, (x, y) in enumerate(((self.places + 1.1) / 2.2 * 128).astype(int)):
            picture[y - 4 : y + 4, x - 4 : x + 4] = ((220, 60, 60), (60, 140, 60), (60, 60, 220))[i % 3]
        return picture

    def close(self) -> None:
        """Nothing to close."""

    def _seen(self) -> dict[str, np.ndarray]:
        seen = {}
        for i, agent in enumerate(self.possible_agents):
            others = np.delete(self.places, i, axis=0) - self.places[i]
            seen[agent] = np.concatenate([self.places[i], others.ravel()]).astype(np.float32)
        return seen
