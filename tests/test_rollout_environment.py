"""The workflow `environment`: games played by scripts and by a tiny model; masks, rewards, limits, failures."""

import asyncio
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from posttrain_lab import TOKENIZER as LETTERS
from posttrain_lab import save_model
from scripted_generator import Scripted
from tiny_server import CONTEXT, TOKENIZER, tiny_engine

from palestra.data.tokenizers import character_tokenizer
from palestra.errors import UsageError
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Sampling
from palestra.rollout.episode import Episode, Workflow, encode_problem
from palestra.rollout.types import Trajectory
from palestra.rollout.workflows import make_workflow
from palestra.spec.kinds.posttrain import EnvironmentSpec
from palestra.tasks.task import Problem, make_task

KNOWS = character_tokenizer("".join(map(chr, range(32, 127))) + "\n…")


def own(name: str = "Sums", **args: Any) -> Problem:
    return make_task(f"environment:played_environments:{name}", args).problems("train")[0]


def roll(
    problem: Problem, generator: Any, samples: int = 2, tokenizer: Any = KNOWS, **changes: Any
) -> list[Trajectory]:
    sampling = Sampling(max_new_tokens=changes.pop("new", 8), stop=("\n",) if isinstance(problem.prompt, str) else ())
    context, root = changes.pop("context", 4000), changes.pop("root", Path("runs"))
    episode = Episode(
        problem,
        encode_problem(problem, tokenizer),
        samples,
        5,
        sampling,
        generator,
        None,
        tokenizer,
        context,  # type: ignore[arg-type]
    )

    async def go() -> list[Trajectory]:
        return await workflow(root, *sorted(changes.items()))(episode)

    return asyncio.run(go())


@cache
def workflow(root: Path, *changes: tuple[str, Any]) -> Workflow:
    """One for all tests that want the same: a worker takes seconds to import its first game."""
    return make_workflow(EnvironmentSpec(name="environment", **dict(changes)), root)


def script(*actions: str) -> Scripted:
    """Writes these actions, one a turn; the turn is counted by the observations that were read."""

    def write(prompt: str, index: int) -> str:
        return f"{actions[min(prompt.count(chr(10)) // 2, len(actions) - 1)]}\n"

    return Scripted(KNOWS, write)


def test_episode_has_tokens_read_and_sampled_and_a_reward_for_every_turn() -> None:
    one, other = roll(own(), script("3", "4", "5"))
    assert one.turn_rewards == (3.0, 4.0, 5.0)
    assert one.reward == one.verdict.score == 12.0
    assert one.verdict.status == "correct"
    assert len(one.turns) == 3
    text = KNOWS.decode(one.tokens)
    assert text.startswith("seed ")
    assert [KNOWS.decode(one.tokens[begin:end]) for begin, end in one.turns] == ["3\n", "4\n", "5\n"]
    inside = {place for begin, end in one.turns for place in range(begin, end)}
    assert list(one.loss_mask) == [place in inside for place in range(len(one.tokens))]
    assert KNOWS.decode(other.tokens) == text  # the same seed, although both games share a worker


def test_sparse_reward_is_success_at_the_end() -> None:
    (won,) = roll(own(sparse=True, success=12.0), script("3", "4", "5"), 1)
    assert (won.turn_rewards, won.reward) == ((0.0, 0.0, 1.0), 1.0)
    (lost,) = roll(own(sparse=True, success=13.0), script("3", "4", "5"), 1)
    assert (lost.turn_rewards, lost.reward, lost.verdict.status) == ((0.0, 0.0, 0.0), 0.0, "wrong")


@pytest.mark.parametrize(
    ("action", "why"),
    [("raise", "ValueError: a broken game"), ("hang", "took longer than 2 s"), ("die", "exited with code 3")],
)
def test_environment_that_fails_is_an_error_and_not_a_score(action: str, why: str) -> None:
    bad, *_ = roll(own(), script("3", action), seconds=2.0)
    assert bad.verdict.status == "error"
    assert why in bad.verdict.note


def test_game_whose_worker_was_killed_by_another_goes_on_where_it_was() -> None:
    """One kills their worker in its second turn; the other is replayed, random numbers included."""
    alone = roll(own(), script("3", "4", "5"), samples=1)[0]
    mixed = script("3", "4", "5")
    died = {"yes": False}

    def fatal(prompt: str, index: int) -> str:
        if prompt.count("\n") // 2 == 1 and not died["yes"]:
            died["yes"] = True
            return "die\n"
        return mixed.script(prompt, index)

    both = roll(own(), Scripted(KNOWS, fatal))
    assert sorted(str(one.verdict.status) for one in both) == ["correct", "error"]
    (good,) = [one for one in both if one.verdict.status == "correct"]
    assert good.tokens == alone.tokens


def test_limits_end_an_episode_with_the_reward_of_an_unfinished_one() -> None:
    (turns,) = roll(own(unfinished=-1.0), script("1"), samples=1, turns=3)
    assert turns.turn_rewards == (1.0, 1.0, 0.0)
    assert (turns.stop_reason, turns.verdict.status) == ("length", "wrong")
    (tokens,) = roll(own(), script("1"), samples=1, tokens=30)
    assert len(tokens.tokens) <= 30
    assert tokens.verdict.parts["finished"] == 0.0


def test_first_observation_that_leaves_no_room_is_an_error() -> None:
    (one,) = roll(own(), script("1"), samples=1, tokens=5)
    assert (one.verdict.status, one.verdict.note) == ("error", "player 0 has reached a limit before its first action")


def test_long_observation_keeps_head_and_tail_and_a_hook_may_rewrite_it() -> None:
    (one,) = roll(own(), script("long", "9", "9"), samples=1, observation=100)
    assert f"{'a' * 50} [… 500 characters left out …] {'z' * 50}" in KNOWS.decode(one.tokens)
    (other,) = roll(own(), script("long", "9", "9"), samples=1, summarize="played_environments:shout")
    assert "<600>\n" in KNOWS.decode(other.tokens)


def tictactoe(prompt: str, index: int) -> str:
    """The first player takes 0, 1, 2 and the other 3, 4."""
    first = "You are Player 0" in prompt
    turn = sum(line.isdigit() or (line.startswith("[") and line[1:2].isdigit()) for line in prompt.split("\n"))
    return f"[{turn if first else 3 + turn}]\n"


def test_self_play_gives_two_trajectories_of_one_game_with_their_own_rewards() -> None:
    problem = make_task("textarena:TicTacToe-v0").problems("train")[0]
    one, other = roll(problem, Scripted(KNOWS, tictactoe))
    assert (one.reward, other.reward) == (1.0, -1.0)
    assert one.turn_rewards == (0.0, 0.0, 1.0)
    assert other.turn_rewards == (0.0, -1.0)
    assert (one.verdict.parts["won"], other.verdict.parts["lost"]) == (1.0, 1.0)
    assert "You are Player 0" in KNOWS.decode(one.tokens)
    assert "You are Player 1" in KNOWS.decode(other.tokens)


@pytest.mark.parametrize("number", [0, 1])
def test_random_opponent_plays_legal_moves_from_either_seat(number: int) -> None:
    problem = make_task("textarena:TicTacToe-v0", {"opponent": "random"}).problems("train")[number]
    taken: list[str] = []

    def lowest(prompt: str, index: int) -> str:
        taken.append(prompt)
        return "[" + prompt.rpartition("Available Moves: '[")[2][0] + "]\n"

    games = roll(problem, Scripted(KNOWS, lowest), samples=4)
    assert len(games) == 4
    assert f"You are Player {number}" in taken[0]
    assert {one.verdict.parts["invalid"] for one in games} == {0.0}
    assert all(one.verdict.status != "error" for one in games)
    again = roll(problem, Scripted(KNOWS, lowest), samples=4)
    assert [one.tokens for one in again] == [one.tokens for one in games]


def test_own_function_as_opponent_loses_by_its_invalid_moves() -> None:
    args = {"opponent": "played_environments:center_first"}
    problem = make_task("textarena:TicTacToe-v0", args).problems("train")[0]
    (one,) = roll(problem, Scripted(KNOWS, tictactoe), samples=1)
    assert one.reward == 1.0


def test_frozen_model_as_opponent_plays_and_only_the_policy_has_a_trajectory(tmp_path: Path) -> None:
    save_model(tmp_path / "past")
    args = {"opponent": str(tmp_path / "past")}
    problem = make_task("textarena:IteratedRockPaperScissors-v0", args).problems("train")[0]
    policy = Scripted(LETTERS, lambda prompt, index: "rock\n")
    one, other = roll(problem, policy, tokenizer=LETTERS, summarize="played_environments:shout")
    assert one.verdict.parts["won"] == 1.0  # what the opponent writes is no move
    assert LETTERS.decode(one.tokens).startswith("<")
    assert set(compress(one.versions, one.loss_mask)) == {7}  # the script's: nothing of the opponent is trained on
    assert len(policy.requests) == len(one.turns) + len(other.turns)
    (short,) = roll(problem, policy, 1, tokenizer=LETTERS)
    assert (short.verdict.status, "has reached a limit" in short.verdict.note) == ("error", True)


@pytest.mark.parametrize(
    ("id", "config"), [("CartPole-v1", {}), ("FrozenLake-v1", {"is_slippery": False}), ("Pendulum-v1", {})]
)
def test_tiny_model_plays_gymnasium(id: str, config: dict[str, Any]) -> None:
    problem = make_task(f"gymnasium:{id}", {"config": config}).problems("train")[0]
    with LocalGenerator(tiny_engine()) as generator:
        played = roll(problem, generator, tokenizer=TOKENIZER, context=CONTEXT, turns=3)
    assert len(played) == 2
    assert all(one.sampled and one.verdict.status != "error" for one in played)


def test_gymnasium_actions_are_names_or_numbers() -> None:
    problem = make_task("gymnasium:FrozenLake-v1", {"config": {"is_slippery": False}}).problems("train")[0]
    path = ["go down", "1", "right", "Right!", "up? no: down", "2"]
    (one,) = roll(problem, script(*path), samples=1, new=20)
    assert one.reward in (0.0, 1.0)
    (bad,) = roll(problem, script("nowhere"), samples=1, new=20, turns=2)
    assert "Invalid action. Actions: left, down, right, up." in KNOWS.decode(bad.tokens)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("textarena:TicTacTo-v0", "Did you mean 'TicTacToe-v0'?"),
        ("gymnasium:CartPol-v1", "Did you mean 'CartPole-v1'?"),
        ("reasoning_gym:leg_countin", "Did you mean 'leg_counting'?"),
        ("textarena", "Did you mean 'textarena'?"),
    ],
)
def test_unknown_names_are_suggested(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint.replace("?", r"\?")):
        make_task(name)


@pytest.mark.parametrize("name", ["Wordle-v0", "Hangman-v0", "WordLadder-v0"])
def test_word_games_without_nltks_lists_take_the_packages_own_words(name: str, monkeypatch) -> None:
    monkeypatch.setenv("NLTK_DATA", "/nowhere")
    problem = make_task(f"textarena:{name}").problems("train")[0]
    one, other = roll(problem, script("[crane]"), turns=1)
    assert one.verdict.status != "error"
    assert one.tokens == other.tokens  # the same seed, the same word
