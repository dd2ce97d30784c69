"""Lists a taskset's tasks or plays them, where the package verifiers is installed; imports nothing of palestra.

    python taskset_player.py '{"taskset": {"id": "my_taskset"}}' 100 [list]

Without `list` every line of the input is {"id", "number", "url", "key"}: the task to play with the model behind that
address; the line of the answer is {"id", "reward"} or {"id", "error"}. The input's end ends it. {"cancel"} is ignored.
"""

import asyncio
import json
import os
import sys
from typing import Any


async def main(block: dict[str, Any], size: int, only_list: bool) -> None:
    """List the tasks, or play those that the input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not be taken for an answer
    sys.path.append(os.getcwd())
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    environment = load_environment(resolve_env_config(block))
    tasks = list(environment.taskset.take(size))
    if only_list:
        print(json.dumps([text_of(task.data.prompt) for task in tasks]), file=answers, flush=True)
        return
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing: set[asyncio.Task[None]] = set()

    async def answer(job: dict[str, Any]) -> None:
        try:
            result = {"reward": await play(environment, tasks[job["number"]], job)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": job["id"], **result}), file=answers, flush=True)

    async with environment.serving():
        while line := await lines.readline():
            job = json.loads(line)
            if "cancel" not in job:  # one that is given up ends by itself: its session has ended
                playing.add(task := asyncio.create_task(answer(job)))
                task.add_done_callback(playing.discard)
        await asyncio.gather(*playing)


async def play(environment: Any, task: Any, job: dict[str, Any]) -> float:
    """One episode; the mean reward of its trained traces."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.types import SamplingConfig

    variable = f"PALESTRA_SESSION_{job['id']}"  # their clients read keys from the environment
    os.environ[variable] = job["key"]
    try:
        client = EvalClientConfig(base_url=f"{job['url']}/v1", api_key_var=variable)
        context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, context)
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode is not complete")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return sum(rewards) / len(rewards)


def text_of(prompt: Any) -> str:
    """A prompt as text: it may be a list of messages, or none."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return "\n\n".join(str(message.content) for message in prompt)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2]), "list" in sys.argv[3:]))
