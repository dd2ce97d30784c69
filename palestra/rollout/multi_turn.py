"""The workflow with a second chance: after a wrong answer the model is told so and tries again."""

from palestra.generate.types import Generation, StopReason
from palestra.rollout.episode import Episode
from palestra.rollout.feedback import feedback_tokens, following
from palestra.rollout.start import Workflow
from palestra.rollout.transcript import Transcript, sampled
from palestra.rollout.types import Trajectory
from palestra.spec.kinds.posttrain import MultiTurnSpec
from palestra.tasks.types import Status


def multi_turn(spec: MultiTurnSpec) -> Workflow:
    """The workflow of a spec. Every turn is trained, with the verdict of the last one, discounted by their number."""

    async def workflow(episode: Episode) -> list[Trajectory]:
        told = [
            feedback_tokens(episode.problem, episode.tokenizer, spec.feedback, turn) for turn in range(1, spec.turns)
        ]

        async def go_on(sample: int, answer: Generation) -> Trajectory:
            said, turn = Transcript.of(episode.prompt), 1
            while True:
                verdict = await episode.verdict(answer, said.tokens)
                said = said.drew(answer)
                # An answer that could not be judged must not be called wrong.
                if verdict.status in (Status.CORRECT, Status.ERROR) or answer.stop_reason == StopReason.ABORT:
                    break
                if turn == spec.turns:
                    break
                longer = said.told(following(answer.tokens, told[turn - 1], episode.tokenizer))
                if len(longer.tokens) >= episode.context:
                    break
                said = longer
                (answer,) = await episode.generate(said.tokens, turn=turn, sample=sample)
                turn += 1
            reward = verdict.score * spec.discount ** (turn - 1)
            return said.trajectory(len(episode.prompt), verdict, reward, str(answer.stop_reason), episode.tokenizer)

        return await sampled(episode, go_on)

    return workflow
