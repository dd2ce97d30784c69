"""A trained reward model as a reward."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_lm import Lab

from palestra.errors import UsageError
from palestra.lm.scorer import Scorer
from palestra.spec.tasks import RewardSpec, TaskUse
from palestra.tasks.rewards.rewards import AT_ONCE, RewardModel, make_reward, whole_model
from palestra.tasks.task import Completion, Problem, Status, Verdict
from palestra.tasks.verify.workers import Verifiers

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
    return Scorer.load(whole_model("reward_model", lab.root))


def verdicts(reward: RewardModel, problem: Problem, *texts: str) -> list[Verdict]:
    async def all_at_once() -> list[Verdict]:
        return await asyncio.gather(*(reward.verify(problem, Completion(text)) for text in texts))

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
    folder = whole_model("reward_model", lab.root)
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
    with Verifiers([use], root=lab.root) as judges:
        verdict = asyncio.run(judges.verify(PLAIN, Completion("yes")))
    assert verdict.score == scorer.score(turns)
    assert verdict.seconds > 0


class Held(Scorer):
    """A scorer that begins when it is told to, and counts what it was given each time."""

    def __init__(self, scorer: Scorer):
        super().__init__(scorer.model, scorer.tokenizer)
        self.begin, self.reached, self.taken = threading.Event(), threading.Event(), []

    def token_scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self.reached.set()
        self.begin.wait()
        self.taken.append(len(sequences))
        return super().token_scores(sequences)


def test_answers_that_wait_are_scored_together_up_to_a_bound_and_get_their_own_scores(scorer: Scorer):
    held = Held(scorer)
    reward, texts = RewardModel(held), ["yes red", "no", "cat", "old hen sits", ""]
    count = 2 * AT_ONCE + 100

    async def judged() -> list[Verdict]:
        tasks = [asyncio.create_task(reward.verify(PLAIN, Completion(texts[i % len(texts)]))) for i in range(count)]
        await asyncio.sleep(0)  # all of them wait
        held.begin.set()
        return await asyncio.gather(*tasks)

    found = asyncio.run(judged())
    reward.close()
    alone = [scorer.score([{"role": "user", "content": "red cat"}, {"role": "assistant", "content": t}]) for t in texts]
    assert [one.score for one in found] == [alone[i % len(texts)] for i in range(count)]
    sizes = [size for size in held.taken if size]
    assert sum(sizes) == count
    assert max(sizes) == AT_ONCE
    assert len(sizes) <= 5  # the first of them was taken while others were still coming


def test_a_conversation_that_cannot_be_scored_spoils_none_beside_it(scorer: Scorer):
    held = Held(scorer)
    reward = RewardModel(held)

    async def judged() -> list[Verdict | BaseException]:
        texts = ["yes red", "λ", "red " * 50, "no"]
        tasks = [asyncio.create_task(reward.verify(PLAIN, Completion(text))) for text in texts]
        await asyncio.sleep(0)
        held.begin.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    good, unknown, long, bad = asyncio.run(judged())
    reward.close()
    assert isinstance(good, Verdict)
    assert isinstance(bad, Verdict)
    assert good.score > bad.score
    assert isinstance(unknown, UsageError)
    assert "no token for 'λ'" in str(unknown)
    assert isinstance(long, Verdict)
    assert long.status == Status.ERROR


def test_scores_that_are_no_numbers_are_errors(scorer: Scorer):
    class Broken(Scorer):
        def token_scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
            return [float("nan")] * len(sequences)

    reward = RewardModel(Broken(scorer.model, scorer.tokenizer))
    (found,) = verdicts(reward, PLAIN, "yes")
    reward.close()
    assert found.status == Status.ERROR
    assert "gave nan" in found.note


def test_scoring_that_fails_raises_for_each_answer_and_later_ones_are_scored(scorer: Scorer):
    class Once(Scorer):
        failed = False

        def token_scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
            if not self.failed and sequences:
                self.failed = True
                raise MemoryError("no room")
            return super().token_scores(sequences)

    reward = RewardModel(Once(scorer.model, scorer.tokenizer))
    with pytest.raises(MemoryError, match="no room"):
        verdicts(reward, PLAIN, "yes")
    assert verdicts(reward, PLAIN, "yes")[0].status != Status.ERROR
    reward.close()


def test_closing_cancels_what_waits(scorer: Scorer):
    held = Held(scorer)
    reward = RewardModel(held)

    async def judged() -> tuple[Verdict | BaseException, ...]:
        first = asyncio.create_task(reward.verify(PLAIN, Completion("yes")))
        while not held.reached.is_set():  # until the thread has taken it
            await asyncio.sleep(0.01)
        second = asyncio.create_task(reward.verify(PLAIN, Completion("no")))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(reward.close))
        await asyncio.sleep(0.05)
        held.begin.set()
        await closing
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = asyncio.run(judged())
    assert isinstance(first, Verdict)
    assert isinstance(second, asyncio.CancelledError)
