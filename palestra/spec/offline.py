"""The specs of the algorithms that learn from a file of transitions: behavior cloning, TD3+BC and IQL."""

from typing import Literal

from pydantic import Field

from palestra.spec.optimizer import OptimizerSpec
from palestra.spec.schedule import Rate, constant


class OfflineSpec(OptimizerSpec):
    """Shared fields of this family of algorithms."""

    data: str = Field(min_length=1)
    """File of transitions, as `palestra export RUN --to transitions -o FILE.npz` writes it, or a folder of Minari."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor γ."""
    lr: Rate = constant(3e-4)
    """Learning rate."""
    batch: int = Field(default=256, ge=1)
    """Batch size."""
    horizon: int = Field(default=500, ge=1)
    """Gradient steps per training step; each counts as a frame of `train.frames`."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Gradient norm clipping; null: none."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps per training step."""
        return self.horizon


class BCSpec(OfflineSpec):
    """Behavior cloning: the likelihood of the actions in the file."""

    name: Literal["bc"]
    """Name of the algorithm."""


class OfflineCriticSpec(OfflineSpec):
    """Shared fields of those with critics."""

    critic_lr: Rate | None = None
    """Learning rate of the critics; null: `lr`."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Soft update rate τ of the target networks."""
    policy_delay: int = Field(default=1, ge=1)
    """Critic updates per policy update."""


class TD3BCSpec(OfflineCriticSpec):
    """TD3+BC (Fujimoto & Gu 2021): TD3 with a term that holds the policy at the actions of the file."""

    name: Literal["td3_bc"]
    """Name of the algorithm."""
    alpha: float = Field(default=2.5, gt=0)
    """Weight of the critic's value, divided by its mean size, against the squared distance to the file's actions."""
    policy_delay: int = Field(default=2, ge=1)
    """Critic updates per policy and target update."""
    target_noise: float = Field(default=0.2, ge=0)
    """Standard deviation of target policy smoothing."""
    noise_clip: float = Field(default=0.5, ge=0)
    """Clip the smoothing noise to ± this."""


class IQLSpec(OfflineCriticSpec):
    """Implicit Q-learning (Kostrikov et al. 2022): expectiles of values, then advantage-weighted regression."""

    name: Literal["iql"]
    """Name of the algorithm."""
    expectile: float = Field(default=0.7, gt=0, lt=1)
    """Expectile of the values over actions in the file; towards 1 it is their maximum."""
    beta: float = Field(default=3.0, gt=0)
    """Inverse temperature of the weights exp(β · advantage); 0 would be behavior cloning."""
    max_weight: float = Field(default=100.0, gt=0)
    """Bound of these weights."""
