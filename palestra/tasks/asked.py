"""What a problem asks, as a conversation and as text to read, whatever template the model in training has."""

from palestra.tasks.types import Message, Problem


def messages_of(problem: Problem) -> list[Message]:
    """The conversation to be answered; a plain prompt is one message of the user."""
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    return list(problem.prompt)


def text_of(problem: Problem) -> str:
    """The prompt; of a conversation of one message its content, of a longer one each with its role."""
    messages = messages_of(problem)
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
