"""A trained reward model as a reward: its score of the conversation that the answer ends."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.tasks.asked import messages_of
from palestra.tasks.judge_models import model_folder
from palestra.tasks.types import Answer, Message, Problem, Status, Verdict

if TYPE_CHECKING:
    from palestra.lm.scorer import Scorer


class RewardModel:
    """Scores answers with a reward model, one after the other, in a thread of its own. Above 0 counts as correct."""

    isolated = False

    def __init__(self, scorer: "Scorer"):
        self.scorer = scorer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    @classmethod
    def load(cls, ref: str, root: Path) -> "RewardModel":
        """The reward model of a run, a checkpoint or a folder."""
        from palestra.lm.scorer import Scorer

        return cls(Scorer.load(model_folder(ref, root)))

    async def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """The score of the prompt and the answer as a conversation; a plain prompt is one message of the user."""
        messages = [*messages_of(problem), {"role": "assistant", "content": answer.text}]
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._verdict, messages)

    def close(self) -> None:
        """End the thread; what waits for it is cancelled."""
        self._thread.shutdown(cancel_futures=True)

    def _verdict(self, messages: list[Message]) -> Verdict:
        from palestra.data.chat import encode_chat

        context = self.scorer.model.transformer.shape.context
        length = len(encode_chat(self.scorer.tokenizer, messages, add_generation_prompt=False).tokens)
        if length > context:  # no fault of the spec's, and no sign of a bad answer either
            note = f"the conversation has {length} tokens, and the reward model reads at most {context}"
            return Verdict(0.0, Status.ERROR, note=note)
        score = self.scorer.score(messages)
        if not math.isfinite(score):
            return Verdict(0.0, Status.ERROR, note=f"the reward model gave {score}")
        return Verdict(score, Status.CORRECT if score > 0 else Status.WRONG, {"reward_model": score})
