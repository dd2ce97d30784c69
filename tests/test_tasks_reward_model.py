"""A trained reward model as a reward."""

import asyncio
from pathlib import Path

import pytest
from tiny_lm import Lab

from palestra.errors import UsageError
from palestra.lm.scorer import Scorer
from palestra.spec.tasks import RewardSpec, TaskUse
from palestra.tasks.judge_models import model_folder
from palestra.tasks.judging import Judges
from palestra.tasks.reward_model import RewardModel
from palestra.tasks.rewards import make_reward
from palestra.tasks.types import Answer, Problem, Status, Verdict

PLAIN = Problem("words/train/0", "red cat")
CHAT = Problem("words/train/1", ({"role": "user", "content": "red cat"},))
TURNS = ({"role": "user", "content": "r"}, {"role": "assistant", "content": "n"}, {"role": "user", "content": "c"})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With a run `reward_model` that prefers `yes …` to `no`."""
    made = Lab(tmp_path_factory.mktemp("reward"))
    made.run("reward_model", train__steps=40, every={"log": "20 steps", "eval": "40 steps", "checkpoint": "40 steps"})
    return made


@pytest.fixture(scope="module")
def scorer(lab: Lab) -> Scorer:
    return Scorer.load(model_folder("reward_model", lab.root))


def verdicts(reward: RewardModel, problem: Problem, *texts: str) -> list[Verdict]:
    async def all_at_once() -> list[Verdict]:
        return await asyncio.gather(*(reward.judge(problem, Answer(text)) for text in texts))

    return asyncio.run(all_at_once())


def made(lab: Lab, ref: str = "reward_model") -> RewardModel:
    found = make_reward(RewardSpec(model=ref), lab.root)
    assert isinstance(found, RewardModel)
    return found


def test_reward_model_scores_the_prompt_and_the_answer_as_a_conversation(lab: Lab, scorer: Scorer):
    reward = made(lab)
    texts = ["yes red", "no", "", "cat sits"]
    for problem in (PLAIN, CHAT):
        for text, verdict in zip(texts, verdicts(reward, problem, *texts), strict=True):
            turns = [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": text}]
            assert verdict.score == scorer.score(turns)
            assert verdict.parts == {"reward_model": verdict.score}
    (long,) = verdicts(reward, Problem("words/train/2", TURNS), "y")
    assert long.score == scorer.score([*TURNS, {"role": "assistant", "content": "y"}])
    reward.close()


def test_reward_model_above_0_is_correct_and_has_learned_what_is_preferred(lab: Lab):
    reward = made(lab)
    good, bad = verdicts(reward, PLAIN, "yes red", "no")
    assert good.score > bad.score
    found = verdicts(reward, PLAIN, "yes red", "no", "yes", "red", "runs", "old hen", "sits")
    assert all(one.status == (Status.CORRECT if one.score > 0 else Status.WRONG) for one in found)
    assert {one.status for one in found} == {Status.CORRECT, Status.WRONG}
    reward.close()


def test_reward_model_that_cannot_read_so_much_gives_an_error_not_a_score(lab: Lab):
    reward = made(lab)
    (verdict,) = verdicts(reward, PLAIN, "red " * 50)
    assert verdict.status == Status.ERROR
    assert "the reward model reads at most 48" in verdict.note
    reward.close()


def test_reward_model_from_a_checkpoint_and_a_folder_is_the_same(lab: Lab, scorer: Scorer):
    folder = model_folder("reward_model", lab.root)
    turns = [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": "yes"}]
    for ref in (folder, folder.parent):
        reward = made(lab, str(ref))
        assert verdicts(reward, PLAIN, "yes")[0].score == scorer.score(turns)
        reward.close()


def test_reward_model_that_is_a_language_model_is_refused(lab: Lab, tmp_path: Path):
    lab.run("sft", name="writer")
    with pytest.raises(UsageError, match="is not a reward model: it has no score"):
        made(lab, "writer")
    with pytest.raises(UsageError):
        made(lab, "runs/nothing")


def test_judges_take_their_scores_from_a_reward_model(lab: Lab, scorer: Scorer):
    use = TaskUse(task="arithmetic", name="words", reward=RewardSpec(model="reward_model"))
    turns = [{"role": "user", "content": "red cat"}, {"role": "assistant", "content": "yes"}]
    with Judges([use], root=lab.root) as judges:
        verdict = asyncio.run(judges.judge(PLAIN, Answer("yes")))
    assert verdict.score == scorer.score(turns)
    assert verdict.seconds > 0
