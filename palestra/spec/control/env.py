"""The environment of a control spec, and what is done to what it gives."""

from typing import Literal

from pydantic import Field, JsonValue

from palestra.spec.base import Module
from palestra.spec.model import Model


class EnvSpec(Model):
    """The environment and how many of it run side by side."""

    id: str = Field(min_length=1)
    """The Gymnasium id, for example CartPole-v1; or `module:Class`, imported and made."""
    num_envs: int = Field(default=4, ge=1)
    """How many copies are stepped together (N)."""
    vectorize: Literal["auto", "vector", "sync", "async"] = "auto"
    """How they run: the environment's own vectorised form, one after the other, in processes, or the best there is."""
    kwargs: dict[str, JsonValue] = Field(default={})
    """Arguments for gymnasium.make."""
    module: Module | None = None
    """A module imported first, so that it can register environments."""
    frame_stack: int | None = Field(default=None, ge=2)
    """Give the policy so many of the last observations, one after the other on a new first dimension."""
    normalise_obs: bool = False
    """Bring observations to mean 0 and standard deviation 1, by running statistics that the policy carries with it."""
    clip_obs: float = Field(default=10.0, gt=0)
    """How far a normalised observation may be from 0."""
    normalise_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return; logged returns stay raw."""
    clip_reward: float | None = Field(default=None, gt=0)
    """How far a reward that is learned from may be from 0, after normalisation; null does not clip."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which an environment that does not answer is taken for hung and named."""
