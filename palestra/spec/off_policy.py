"""The off-policy algorithms in a spec of kind `control`: their replay memories and hyperparameters."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from palestra.spec.model import Conflict, Model, without_defaults
from palestra.spec.optimizer import OptimizerSpec
from palestra.spec.schedule import PositiveRate, Rate, Schedule, constant


class PrioritizedSpec(Model):
    """Prioritized experience replay (Schaul et al. 2016)."""

    alpha: float = Field(default=0.6, ge=0, le=1)
    """Priority exponent α; 0 samples uniformly."""
    beta: Rate = Schedule(shape="linear", start=0.4, end=1.0)
    """Importance-weight exponent β; 1 corrects the bias fully."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to every priority, so that none is zero."""


class HerSpec(Model):
    """Hindsight experience replay (Andrychowicz et al. 2017), for goal environments."""

    strategy: Literal["future", "final"] = "future"
    """Goals that the same episode reached: at a random later step, or at its last one so far."""
    k: float = Field(default=4.0, gt=0)
    """Relabeled transitions for each with its own goal."""


class SequenceSpec(Model):
    """Sequences of a replay memory (Kapturowski et al. 2019), each from the recurrent state that acted there."""

    length: int = Field(default=16, ge=1)
    """Steps that are learned from."""
    burn_in: int = Field(default=8, ge=0)
    """Steps before them that only bring the state up to date with the weights."""

    @property
    def rows(self) -> int:
        """Steps of a sequence."""
        return self.length + self.burn_in


class DistributionalSpec(Model):
    """QR-DQN (Dabney et al. 2018): predict quantiles of the return in place of its mean."""

    quantiles: int = Field(default=32, ge=2)
    """Number of quantiles."""


class AtomsSpec(Model):
    """C51 (Bellemare et al. 2017): predict probabilities of fixed returns in place of their mean."""

    atoms: int = Field(ge=2)
    """Number of returns, at equal distances (51 in the paper)."""
    low: float
    """The lowest of them; lower returns count as this one."""
    high: float
    """The highest of them; higher returns count as this one."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.low >= self.high:
            yield Conflict(("low",), f"expected less than high = {self.high:g}, got {self.low:g}")


def _form(value: Any) -> str:
    return "atoms" if isinstance(value, AtomsSpec) or (isinstance(value, dict) and "atoms" in value) else "quantiles"


# Told apart by a field that only one has, so that mistakes in it are refused with its own words.
Distributional = Annotated[
    Annotated[DistributionalSpec, Tag("quantiles")] | Annotated[AtomsSpec, Tag("atoms")], Discriminator(_form)
]


class OffPolicySpec(OptimizerSpec):
    """Shared fields of this family of algorithms."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor γ."""
    lr: Rate = constant(3e-4)
    """Learning rate."""
    batch: int = Field(default=256, ge=1)
    """Batch size."""
    buffer: int = Field(default=1_000_000, ge=1)
    """Replay capacity in transitions, over all environments."""
    start: int = Field(default=1000, ge=1)
    """Frames with random actions before the first gradient step."""
    hold: float = Field(default=1.0, ge=1)
    """Steps for which one of these is held on average, without masks: more reach what single ones do not."""
    replay_ratio: float = Field(default=1.0, gt=0)
    """Gradient steps per frame (update-to-data ratio), for any number of environments."""
    update_every: int = Field(default=1, ge=1)
    """Vector steps between updates; each update makes replay_ratio × num_envs × update_every gradient steps."""
    horizon: int = Field(default=256, ge=1)
    """Vector steps per training step, after which logging, evaluation and checkpoints may be due."""
    n_step: int = Field(default=1, ge=1)
    """n of n-step returns."""
    her: HerSpec | None = None
    """Hindsight experience replay; null: off."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Gradient norm clipping; null: none."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "her", "sequence", "noisy", "optimizer", "weight_decay")

    def updates_at_once(self, num_envs: int) -> int:
        """Gradient steps every `update_every` vector steps."""
        return round(self.replay_ratio * num_envs * self.update_every)

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps per training step, after `start`."""
        return self.horizon // self.update_every * self.updates_at_once(num_envs)


class DQNSpec(OffPolicySpec):
    """DQN (Mnih et al. 2015) with its common extensions."""

    name: Literal["dqn"]
    """Name of the algorithm."""
    lr: Rate = constant(1e-3)
    """Learning rate."""
    batch: int = Field(default=128, ge=1)
    """Batch size."""
    epsilon: Rate = Schedule(shape="linear", start=1.0, end=0.05, finish=0.2)
    """ε of ε-greedy exploration, per environment."""
    temperature: Rate | None = None
    """Boltzmann exploration, softmax(Q / temperature), in place of ε-greedy."""
    target_every: int | None = Field(default=None, ge=1)
    """Gradient steps between hard updates of the target network; null: soft updates by `tau`."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Soft update rate τ of the target network per gradient step; 1: no target network."""
    double: bool = True
    """Double DQN (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Dueling network (Wang et al. 2016)."""
    prioritized: PrioritizedSpec | None = None
    """Prioritized replay; null: uniform."""
    distributional: Distributional | None = None
    """Learn the distribution of returns: quantiles (QR-DQN) or probabilities of atoms (C51); null: their mean."""
    noisy: float | None = Field(default=None, gt=0)
    """Noisy output layers (Fortunato et al. 2018): σ₀ of their initial noise, 0.5 in the paper; null: none."""
    sequence: SequenceSpec = SequenceSpec()
    """Sequences that net.recurrent learns from; `batch` counts their steps without the burn-in."""
    max_grad_norm: float | None = Field(default=10.0, gt=0)
    """Gradient norm clipping; null: none."""


class ActorCriticSpec(OffPolicySpec):
    """Shared fields of SAC, TQC, TD3 and CrossQ."""

    critic_lr: Rate | None = None
    """Learning rate of the critics; null: `lr`."""
    policy_delay: int = Field(default=1, ge=1)
    """Critic updates per policy update."""


class EntropySpec(Model):
    """Shared fields of SAC, TQC and CrossQ."""

    alpha: PositiveRate | Literal["auto"] = "auto"
    """Entropy coefficient; auto tunes it towards `target_entropy`."""
    target_entropy: float | Literal["auto"] = "auto"
    """Target entropy in nats; auto: −dim(A), in units of half the range, or 0.6 · log n for Discrete(n)."""
    alpha_lr: Rate | None = None
    """Learning rate of `alpha`; null: `lr`."""


class SACSpec(EntropySpec, ActorCriticSpec):
    """Soft actor-critic (Haarnoja et al. 2018); for Discrete actions with exact expectations (Christodoulou 2019)."""

    name: Literal["sac"]
    """Name of the algorithm."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Soft update rate τ of the target critics per gradient step."""
    sequence: SequenceSpec = SequenceSpec()
    """Sequences that net.recurrent learns from; `batch` counts their steps without the burn-in."""


class TQCSpec(EntropySpec, ActorCriticSpec):
    """Truncated quantile critics (Kuznetsov et al. 2020): SAC whose critics predict quantiles of the return."""

    name: Literal["tqc"]
    """Name of the algorithm."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Soft update rate τ of the target critics per gradient step."""
    quantiles: int = Field(default=25, ge=2)
    """Number of quantiles of each of the two critics."""
    drop: int = Field(default=2, ge=0)
    """Highest quantiles left out of targets for each critic: more against overestimation."""

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.drop >= self.quantiles:
            yield Conflict(("drop",), f"expected less than quantiles = {self.quantiles}, got {self.drop}")


class TD3Spec(ActorCriticSpec):
    """Twin delayed DDPG (Fujimoto et al. 2018)."""

    name: Literal["td3"]
    """Name of the algorithm."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Soft update rate τ of the target networks per policy update."""
    policy_delay: int = Field(default=2, ge=1)
    """Critic updates per policy and target update."""
    noise: Rate = constant(0.1)
    """Standard deviation of the exploration noise, in units of half the action range."""
    target_noise: float = Field(default=0.2, ge=0)
    """Standard deviation of target policy smoothing."""
    noise_clip: float = Field(default=0.5, ge=0)
    """Clip the smoothing noise to ± this."""


class CrossQSpec(EntropySpec, ActorCriticSpec):
    """CrossQ (Bhatt et al. 2024): SAC without target networks, with batch renormalization in the critics."""

    name: Literal["crossq"]
    """Name of the algorithm."""
    lr: Rate = constant(1e-3)
    """Learning rate."""
    policy_delay: int = Field(default=3, ge=1)
    """Critic updates per policy update."""
    beta1: float = Field(default=0.5, ge=0, lt=1)
    """Adam's β₁."""
    renorm_momentum: float = Field(default=0.01, gt=0, le=1)
    """Momentum of batch renormalization's running statistics."""
    renorm_warmup: int = Field(default=10_000, ge=0)
    """Gradient steps of plain batch norm before batch renormalization is fully active."""
