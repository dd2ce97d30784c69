"""The games of the package textarena: for one player, two, or more.

The list of games is read from the text of the package's registry: importing it takes seconds.
"""

import copy
import random
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

from palestra.errors import MissingExtra, UsageError, needs_extra
from palestra.tasks.environments.environment import EnvironmentTask, Turn
from palestra.tasks.task import Problem

MOST_PLAYERS = 15
TRIES = 50  # actions that a random player tries
_NEEDS = {
    "a key of OpenRouter": "Debate GuessWho ScenarioPlanning TwentyQuestions",
    "Python 3.12": "Checkers Chess IteratedStagHunt ReverseTicTacToe UltimateTexasHoldem",
    "a release of textarena that has it whole": "CharacterConclave Klondike ScorableGames UsedCar UsedCarNegotiation "
    "DontSayIt-v0-unlimited",
    "the package gym": "BabyAiText",
}
NEEDS = {game: needs for needs, games in _NEEDS.items() for game in games.split()}
"""What a game needs besides the package, by the name of its folder there or its id."""


class TextArena(EnvironmentTask):
    """A game of textarena, as `textarena:<id>`. Rewards come at its end, for each player: mostly 1, 0 and -1."""

    source = extra = "textarena"

    @classmethod
    def names(cls) -> dict[str, str]:
        """The ids, each with what it needs besides the package."""
        return {id: NEEDS.get(id, NEEDS.get(folder, "")) for id, (folder, _) in games().items()}


@cache
def games() -> dict[str, tuple[str, int | None]]:
    """Of each id the folder of its game and the least number of players, where the registry says it."""
    listed: dict[str, tuple[str, int | None]] = {}
    players = None
    for line in (_folder() / "envs" / "__init__.py").read_text().splitlines():
        if line.startswith("#"):
            said = re.search(r"(\d+)(?:-\d+)? Players?", line)
            players = int(said[1]) if said else None
        elif match := re.match(r'register\w*\(id="([^"]+)",\s*entry_point="textarena\.envs\.(\w+)\.', line):
            listed[match[1]] = (match[2], players)
    return listed


def _folder() -> Path:
    """That of the package."""
    found = find_spec("textarena")
    if found is None or found.origin is None:
        raise MissingExtra("textarena", "textarena")
    return Path(found.origin).parent


class Game:
    """A game as an `Environment`. `players` is their number; by default the least that it is played with."""

    def __init__(self, id: str, *, players: int | None = None, **config: Any):
        from textarena.core import ActionWrapper
        from textarena.envs.registration import ENV_REGISTRY

        folder, least = games()[id]
        spec: Any = ENV_REGISTRY[id]
        module, name = spec.entry_point.split(":")
        self.id, self._config, self._counts = id, {**spec.kwargs, **config}, _counts(players, least)
        self._wrappers = [wrapper for wrapper in spec.default_wrappers or () if issubclass(wrapper, ActionWrapper)]
        try:
            self._made = getattr(import_module(module), name)
        except (ImportError, SyntaxError) as error:
            needs = NEEDS.get(folder, "more than is installed")
            raise UsageError(f"textarena:{id} needs {needs} ({error})") from error

    @staticmethod
    def warm_up() -> None:
        """Import the package, which takes seconds."""
        with needs_extra("textarena", "textarena"):
            _import_offline()

    def reset(self, seed: int, problem: Problem) -> Turn:
        refused: Exception | None = None
        for players in self._counts:  # a game says how many by refusing
            try:
                self._game, self._players = self._made(**self._config), players
                self._game.reset(num_players=players, seed=seed)
                break
            except (AssertionError, ValueError, OSError) as error:
                refused = refused or error
        else:
            needs = NEEDS.get(games()[self.id][0], "other options")
            raise UsageError(f"textarena:{self.id} needs {needs} ({refused})") from refused
        for wrapper in self._wrappers:
            self._game = wrapper(self._game)
        self._shown: dict[int, str] = {}
        return self._turn()

    def step(self, action: str) -> Turn:
        done, _ = self._game.step(action)
        if not done:
            return self._turn()
        rewards, info = self._game.close()
        # Some games give the reason of an invalid move as its reward.
        scores = {int(p): float(r) if isinstance(r, Real) else 0.0 for p, r in (rewards or {}).items()}
        parts = {f"{one}/invalid": float(info.get(one, {}).get("invalid_move", False)) for one in scores}
        return Turn(rewards=scores, done=True, players=self._players, parts=parts)

    def sample(self, chance: random.Random) -> str:
        """An action that the game accepts, of those in brackets in its texts and small numbers; else any of them."""
        text = self._shown.get(self._game.state.current_player_id, "")
        mentioned = [f"[{inner}]" for inner in re.findall(r"\[([^\[\]\n]{1,30})\]", text)]
        actions = list(dict.fromkeys(one for one in mentioned if not re.match(r"\[(GAME|Player)", one)))
        actions += [one for one in (f"[{number}]" for number in range(10)) if one not in actions]
        chance.shuffle(actions)
        return next((action for action in actions[:TRIES] if self._accepts(action)), actions[0])

    def close(self) -> None:
        """A game holds nothing."""

    def _accepts(self, action: str) -> bool:
        trial = copy.deepcopy(self._game)
        player, errors = trial.state.current_player_id, getattr(trial.state, "error_count", 0)
        before = random.getstate()
        try:
            done, _ = trial.step(action)
        except Exception:  # a trial: the game itself has not seen the action
            return False
        finally:
            random.setstate(before)
        invalid = trial.state.game_info.get(player, {}).get("invalid_move", False)
        again = not done and trial.state.current_player_id == player and getattr(trial.state, "error_count", 0) > errors
        return not (invalid or again)

    def _turn(self) -> Turn:
        from textarena.core import GAME_ID, ObservationType

        player, messages = self._game.get_observation()
        roles = self._game.state.role_mapping
        lines = [
            f"[{'GAME' if sender == GAME_ID else roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if not (sender == player and kind == ObservationType.PLAYER_ACTION)
        ]
        text = "\n".join(lines)
        self._shown[player] = f"{self._shown.get(player, '')}\n{text}"[-4000:]
        return Turn(text, player=player, players=self._players)


@cache
def _import_offline() -> None:
    """Import the package so that no game downloads anything."""
    nltk: Any = import_module("nltk")
    nltk.download = lambda *_, **__: False  # games do so when imported, whether there is a network or not
    try:
        nltk.corpus.words.words(), nltk.pos_tag(["word"])
    except LookupError:  # not downloaded
        nltk.corpus.words = Dictionary(_folder() / "envs" / "utils" / "data" / "en_US.dic")
        nltk.pos_tag = lambda tokens, **_: [(token, "NN") for token in tokens]
    import_module("textarena")  # last: its modules bind these names


class Dictionary:
    """The dictionary that the package carries, in place of NLTK's word lists where those were not downloaded."""

    def __init__(self, path: Path):
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
        entries = [line.strip().partition("/") for line in lines]
        self._all = [word for word, _, _ in entries if word.isalpha()]
        # M: it takes 's, as nouns do (Hunspell's flags for English)
        self._nouns = [word for word, _, flags in entries if re.fullmatch("[a-z]{3,8}", word) and "M" in flags]

    def words(self, name: str = "en") -> list[str]:
        """All words, or short nouns for `en-basic`."""
        return list(self._nouns if name == "en-basic" else self._all)


def _counts(given: int | None, least: int | None) -> list[int]:
    if given is not None:
        return [given]
    first = least or 2
    return [*range(first, MOST_PLAYERS + 1), *range(1, first)]
