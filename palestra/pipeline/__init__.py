"""Pipelines: graphs of steps, each with an address that is a hash of all that its result depends on."""

from palestra.pipeline.step import Execution, Output, Step, step

__all__ = ["Execution", "Output", "Step", "step"]
