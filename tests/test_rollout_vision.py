"""Images in rollouts: episodes, trajectories written and read again, batches, the gateway's sessions."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from posttrain_cases import algorithm
from rollout_groups import group, trajectory
from test_generate_vision_server import PIXELS, TOKENIZER, asked, engine

from palestra.data.media import Image, data_url
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Sampling
from palestra.posttrain.batch import pack
from palestra.rollout.episode import Starter
from palestra.rollout.gateway.chat import ToolChatBody
from palestra.rollout.gateway.dialect import Source
from palestra.rollout.gateway.session import Session
from palestra.rollout.records import RolloutRecord, group_state, load_group, scan, write
from palestra.rollout.types import Group, Trajectory
from palestra.rollout.workflows import single_turn
from palestra.tasks.task import Problem, Status, Verdict, make_task
from palestra.track.sinks import JsonlSink


def seen() -> Group:
    random = np.random.default_rng(0)
    pictures = [Image(random.integers(0, 256, (56, 84, 3), np.uint8), 1) for _ in range(2)]
    made = group([0.0, 1.0, 1.0], trajectories=tuple(trajectory(reward, prompt=20) for reward in (0.0, 1.0, 1.0)))
    media = ((pictures[0],), (pictures[0],), (pictures[0], pictures[1].at(9)))
    rows = tuple(replace(one, media=own) for one, own in zip(made.trajectories, media, strict=True))
    return replace(made, trajectories=rows)


def test_rollouts_written_and_read_again_have_the_same_images(tmp_path: Path) -> None:
    made = seen()
    sink = JsonlSink(tmp_path / "rollouts.jsonl", append=False)
    write(sink, RolloutRecord(made, "filtered", 1))
    sink.close()
    (record,) = scan(tmp_path / "rollouts.jsonl")
    assert record.group == made
    text = (tmp_path / "rollouts.jsonl").read_text()
    assert text.count("data:image/png") == 2  # each once


def test_checkpoint_of_a_group_keeps_its_images() -> None:
    made = seen()
    assert load_group(group_state(made), lambda id: made.problem) == made


def test_groups_without_images_are_written_as_before() -> None:
    state = group_state(group([0.0, 1.0]))
    assert "media" not in state
    assert "media" not in state["trajectories"][0]


def test_batch_has_the_images_of_its_trajectories() -> None:
    made = seen()
    batch = pack([made], algorithm("grpo"))
    assert batch.images == tuple(one.media for one in made.trajectories)
    assert batch.positions.shape == (3, len(batch.tokens))


def test_episode_of_a_picture_gives_trajectories_with_it() -> None:
    task = make_task("count_shapes", {"question": "How many?"})
    problem = task.problems("train")[0]
    verify: Any = lambda problem, completion: Verdict(1.0, Status.CORRECT)  # noqa: E731

    async def rollout(generator: LocalGenerator) -> list[Trajectory]:
        starter = Starter(
            tasks={"count_shapes": task},
            workflow=single_turn,
            generator=generator,
            verify=verify,
            tokenizer=TOKENIZER,
            sampling=Sampling(max_new_tokens=3),
            samples=2,
            seed=0,
            context=96,
            max_prompt=90,
        )
        work = starter(problem, 0, 0)
        assert work is not None
        return await work

    with LocalGenerator(engine()) as generator:
        rows = asyncio.run(rollout(generator))
    for row in rows:
        (image,) = row.media
        assert row.tokens[image.start : image.stop] == (TOKENIZER.image_pad,) * 4


def test_gateway_turn_with_a_second_image_continues_the_first() -> None:
    def body(messages: list[dict[str, Any]]) -> ToolChatBody:
        return ToolChatBody.model_validate({"messages": messages, "max_tokens": 4, "temperature": 1.0})

    async def talk(generator: LocalGenerator) -> list[Trajectory]:
        session = Session("key", Source(generator), TOKENIZER, context=96, model="tiny", seed=1)
        messages = asked(data_url(PIXELS))
        for number in range(2):
            exchange = await session.exchange(body(messages).conversation(96), str(number), False)
            (reply,) = await exchange.replies()
            session.deliver(exchange)
            other = np.full((56, 56, 3), 9, np.uint8)
            messages = [*messages, {"role": "assistant", "content": reply.text}, *asked(data_url(other))]
        return session.trajectories(Verdict(1.0, Status.CORRECT), 1.0, "branches")

    with LocalGenerator(engine()) as generator:
        (row,) = asyncio.run(talk(generator))
    assert [image.tokens for image in row.media] == [6, 4]
    for image in row.media:
        assert row.tokens[image.start : image.stop] == (TOKENIZER.image_pad,) * image.tokens
    assert len(row.turns) == 2


def test_problem_as_text_has_a_mark_for_its_picture() -> None:
    problem = Problem("p/train/0", tuple(asked(data_url(PIXELS))))
    assert problem.text == "<image>\nHow many?"
