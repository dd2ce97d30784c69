"""One attempt at a step, as a worker carries it out: inputs fetched, function called, what it wrote made to last."""

from collections.abc import Callable, Sequence
from typing import Any

from palestra.pipeline.outputs import Outputs
from palestra.pipeline.step import call


def carry_out(
    outputs: Outputs,
    address: str,
    attempt: str,
    function: Callable[..., Any] | str,
    config: Any,
    *,
    inputs: Sequence[str],
    resumes: bool,
) -> dict[str, Any]:
    """Do a step up to its commit, which is the owner of the lease's; gives what its status has to say of the output."""
    with outputs.alone(address):
        for needed in inputs:
            outputs.fetch(needed)
        call(function, config, outputs.begin(address, attempt, resumes=resumes))
        return outputs.send(address, attempt)
