"""Pipelines: steps that know their inputs, each with an address made of all that its result depends on."""

from palestra.pipeline.step import Execution, Output, Step, step

__all__ = ["Execution", "Output", "Step", "step"]
