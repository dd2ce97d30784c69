"""What an experiment is: typed specs, and how they are loaded, composed, overridden and checked."""

from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds import KINDS, Kind, kinds, loader, runner, spec_type
from palestra.spec.load import Difference, Loaded, differences, load, spec_hash, to_yaml
from palestra.spec.model import Cadence, Model, plain
from palestra.spec.validate import SpecError, SpecProblem, validate

__all__ = [
    "KINDS",
    "Cadence",
    "Difference",
    "ExperimentSpec",
    "Kind",
    "Loaded",
    "Model",
    "SpecError",
    "SpecProblem",
    "differences",
    "kinds",
    "load",
    "loader",
    "plain",
    "runner",
    "spec_hash",
    "spec_type",
    "to_yaml",
    "validate",
]
