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
    paid, ended, cut = (
        np.array([by_agent[agent] for agent in agents]) for by_agent in (rewards, terminated, truncated)
    )
    return obs, paid, ended, cut


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
