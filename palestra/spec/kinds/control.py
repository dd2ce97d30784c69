"""The spec of kind `control`: deep RL in Gymnasium environments, its networks and algorithms."""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from palestra.spec.base import Every, ExperimentSpec, Function, Module
from palestra.spec.cluster import EnvClusterSpec
from palestra.spec.model import Cadence, Conflict, CountCadence, Execution, Model, without_defaults
from palestra.spec.off_policy import ActorCriticSpec, CrossQSpec, DQNSpec, OffPolicySpec, SACSpec, TD3Spec, TQCSpec
from palestra.spec.offline import BCSpec, IQLSpec, OfflineCriticSpec, OfflineSpec, TD3BCSpec
from palestra.spec.optimizer import OptimizerSpec
from palestra.spec.schedule import PositiveRate, Rate, Schedule, constant, warmup_conflicts
from palestra.spec.shape import NetSpec

PETTINGZOO = "pettingzoo:"
"""Begins the id of a parallel environment of PettingZoo."""
JAX = ("brax:", "playground:", "gymnax:")
"""Begin the ids of environments that are written in JAX."""


class EnvSpec(Model):
    """The environment and its vectorization."""

    id: str = Field(min_length=1)
    """Gymnasium id such as CartPole-v1, `module:Class`, `pettingzoo:module`, or in JAX `brax:ant`, `gymnax:…`."""
    num_envs: int = Field(default=4, ge=1)
    """Number of parallel environments (N); of several agents, the agents of all games together."""
    vectorize: Literal["auto", "vector", "sync", "async", "envpool"] = "auto"
    """The environment's own vectorization, one after another (`sync`), processes (`async`), EnvPool, or the fastest."""
    kwargs: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of gymnasium.make."""
    module: Module | None = None
    """Module to import first, which registers environments."""
    frame_stack: int | None = Field(default=None, ge=2)
    """Stack this many last observations along a new first dimension."""
    normalize_obs: bool = False
    """Normalize observations by running mean and standard deviation, which are saved with the policy."""
    clip_obs: float = Field(default=10.0, gt=0)
    """Clip normalized observations to ± this."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return; logged returns stay raw."""
    clip_reward: float | None = Field(default=None, gt=0)
    """Clip training rewards (after normalization) to ± this; null: no clipping."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which an unresponsive environment is reported as hung."""
    components: list[str] = Field(default=[])
    """Keys of `info` whose sums over an episode are logged as component/KEY; `reward`: the parts of a vector reward."""
    reward_weights: list[float] | None = None
    """Of an environment with vector rewards: the weights that make them one number; null: rewards are numbers."""
    policies: int = Field(default=1, ge=1)
    """Of several agents: 1, one policy for all; or their number, networks of its own for each."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "components", "reward_weights", "policies")


class SelfImitationSpec(Model):
    """Self-imitation learning (Oh et al. 2018): replay transitions whose return exceeded their value."""

    buffer: int = Field(default=100_000, ge=1)
    """Replay capacity in transitions of whole episodes."""
    batch: int = Field(default=512, ge=1)
    """Batch size of its gradient steps."""
    updates: int = Field(default=4, ge=1)
    """Gradient steps after each policy update."""
    coef: float = Field(default=0.1, gt=0)
    """Coefficient of its policy loss."""
    value_coef: float = Field(default=0.01, ge=0)
    """Coefficient of its value loss."""
    alpha: float = Field(default=0.6, ge=0)
    """Priority exponent α; 0 samples uniformly."""
    beta: float = Field(default=0.1, ge=0, le=1)
    """Importance-weight exponent β."""


class OnPolicySpec(OptimizerSpec):
    """Shared fields of this family of algorithms."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor γ."""
    entropy: Rate = constant(0.0)
    """Entropy bonus coefficient."""
    lr: Rate = constant(3e-4)
    """Learning rate."""
    horizon: int = Field(default=128, ge=1)
    """Rollout length per environment between updates (T)."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradient norm clipping; null: none."""
    adam_eps: float = Field(default=1e-5, gt=0)
    """The optimizer's ε."""
    distribution: Literal["gaussian", "beta"] = "gaussian"
    """Distribution of continuous actions: a Gaussian clipped to the bounds, or a Beta within them."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "optimizer", "weight_decay", "critic_lr")

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps per policy update."""
        return 1


class ReinforceSpec(OnPolicySpec):
    """REINFORCE (Williams 1992): Monte-Carlo returns of whole episodes, no critic."""

    name: Literal["reinforce"]
    """Name of the algorithm."""
    normalize_returns: bool = True
    """Normalize the returns of each update to mean 0 and standard deviation 1."""


class A2CSpec(OnPolicySpec):
    """Synchronous advantage actor-critic (Mnih et al. 2016)."""

    name: Literal["a2c"]
    """Name of the algorithm."""
    lr: Rate = constant(7e-4)
    """Learning rate."""
    critic_lr: Rate | None = None
    """Learning rate of the value's own layers; null: `lr`."""
    lam: float | None = Field(default=0.95, ge=0, le=1)
    """λ of generalized advantage estimation; null: n-step returns up to the horizon (λ = 1)."""
    value_coef: float = Field(default=0.5, ge=0)
    """Value loss coefficient."""
    horizon: int = Field(default=16, ge=1)
    """Rollout length per environment between updates (T)."""
    normalize_advantages: bool = False
    """Normalize the advantages of each update to mean 0 and standard deviation 1."""
    self_imitation: SelfImitationSpec | None = None
    """Self-imitation learning; null: off."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps per policy update."""
        return 1 + (0 if self.self_imitation is None else self.self_imitation.updates)


class PPOSpec(OnPolicySpec):
    """Proximal policy optimization (Schulman et al. 2017)."""

    name: Literal["ppo"]
    """Name of the algorithm."""
    critic_lr: Rate | None = None
    """Learning rate of the value's own layers; null: `lr`."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """λ of generalized advantage estimation."""
    clip: PositiveRate = constant(0.2)
    """Clip range of the probability ratio (ε)."""
    clip_value: float | None = Field(default=None, gt=0)
    """Clip range of the value loss around the old prediction; null: no clipping."""
    value_coef: float = Field(default=0.5, ge=0)
    """Value loss coefficient."""
    minibatch: int = Field(default=128, ge=1)
    """Minibatch size in transitions; divides horizon × num_envs."""
    epochs: int = Field(default=4, ge=1)
    """Epochs over each rollout."""
    normalize_advantages: bool = True
    """Normalize advantages per minibatch to mean 0 and standard deviation 1."""
    staleness: int = Field(default=0, ge=0)
    """Policy improvements between collecting a rollout, meanwhile in other processes, and V-trace learning from it."""
    target_kl: float | None = Field(default=None, gt=0)
    """Stop the epochs of an update once the approximate KL to the rollout policy exceeds this; null: never."""
    self_imitation: SelfImitationSpec | None = None
    """Self-imitation learning; null: off."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps per policy update, without early stopping by `target_kl`."""
        imitation = 0 if self.self_imitation is None else self.self_imitation.updates
        return self.epochs * self.horizon * num_envs // self.minibatch + imitation


class SARSASpec(OptimizerSpec):
    """Deep SARSA(λ) (Rummery & Niranjan 1994): on-policy Q-learning."""

    name: Literal["sarsa"]
    """Name of the algorithm."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor γ."""
    epsilon: Rate = Schedule(shape="linear", start=1.0, end=0.05, finish=0.5)
    """ε of ε-greedy exploration, per environment."""
    temperature: Rate | None = None
    """Boltzmann exploration, softmax(Q / temperature), in place of ε-greedy."""
    lam: float = Field(default=0.0, ge=0, le=1)
    """λ of the λ-return targets; 0: one-step targets."""
    lr: Rate = constant(1e-3)
    """Learning rate."""
    horizon: int = Field(default=32, ge=1)
    """Rollout length per environment between updates (T)."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradient norm clipping; null: none."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps per policy update."""
        return 1


ActorCriticAlgorithm = SACSpec | TQCSpec | TD3Spec | CrossQSpec
OfflineAlgorithm = BCSpec | TD3BCSpec | IQLSpec
AlgorithmSpec = Annotated[
    ReinforceSpec | SARSASpec | A2CSpec | PPOSpec | DQNSpec | ActorCriticAlgorithm | OfflineAlgorithm,
    Field(discriminator="name"),
]
"""The algorithms, discriminated by `name`."""


class TrainSpec(Model):
    """How long and how to train."""

    frames: int = Field(ge=1)
    """Environment frames to train for, over all environments; rounded up to whole steps."""
    compile: Execution[Literal["auto", "on", "off"]] = "auto"
    """Compile the gradient step; auto: when the run is long enough to pay for it. On a GPU both make CUDA graphs."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Matmul precision; bf16 is several times faster for wide networks on a CPU with AMX."""


WIDE, WIDE_NET = ("sac", "tqc"), {"hidden": [256, 256], "activation": "relu", "orthogonal": False}
"""Algorithms with a default network of their own, and what of it differs from `NetSpec`'s."""

AUTO_EVALUATIONS = 20  # at most, in a run whose `every.eval` is auto
EVALUATED_SHARE = 10  # one frame of evaluation for that many of training, where `every.eval` is auto


class EvalSpec(Model):
    """Evaluation with deterministic actions, in separate environments."""

    episodes: int = Field(default=10, ge=1)
    """Episodes per evaluation."""
    num_envs: int = Field(default=20, ge=1)
    """Maximum parallel environments."""


# Told apart before either is validated, so that a bad cadence is refused with the words of cadences.
AutoCadence = Annotated[
    Annotated[CountCadence, Tag("cadence")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "cadence"),
]


class ControlEvery(Every):
    """Cadences; a step is one rollout and update, a frame one environment transition."""

    eval: AutoCadence | None = "auto"  # pyrefly: ignore[bad-override]
    """When to evaluate besides at the end: auto up to 20 times, within 10 % of the frames; null: only at the end."""
    video: CountCadence | None = None
    """When to write an episode with the most likely actions as a GIF into the session's videos/; null: never."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "video")


class ControlSpec(ExperimentSpec):
    """Deep RL: one policy trained by one algorithm in parallel copies of one environment."""

    kind: Literal["control"]
    """Kind of experiment."""
    env: EnvSpec
    """The environment."""
    algorithm: AlgorithmSpec
    """RL algorithm and its hyperparameters."""
    net: NetSpec = NetSpec()
    """Policy and value networks; by default of SAC and TQC `hidden: [256, 256]`, `activation: relu`, not orthogonal."""
    init: str | None = Field(default=None, min_length=1)
    """A zip of Stable-Baselines3 whose policy, critics and targets to start from; null: new networks."""
    train: TrainSpec
    """Length of training and precision."""
    eval: EvalSpec = EvalSpec()
    """Evaluation."""
    every: ControlEvery = ControlEvery()
    """How often to checkpoint, evaluate and log."""
    cluster: Execution[EnvClusterSpec] = EnvClusterSpec()
    """Where the environments are: in this run's own processes, or in others of this machine or a Ray cluster."""
    on_step: list[Function] = Field(default=[])
    """Functions called after every step of the training environments, each as module:function."""
    on_episode: list[Function] = Field(default=[])
    """Functions called at the end of every training episode, each as module:function."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "on_step", "on_episode")

    @model_validator(mode="before")
    @classmethod
    def _with_usual_net(cls, data: Any) -> Any:
        """Fill in the network of the papers and of Stable-Baselines3, so that a resolved spec shows it."""
        if not isinstance(data, Mapping):
            return data
        algorithm, net = data.get("algorithm"), data.get("net", {})
        if not (isinstance(algorithm, Mapping) and algorithm.get("name") in WIDE and isinstance(net, Mapping)):
            return data
        return {**data, "net": {**WIDE_NET, **net}}

    def default_origin(self, path: tuple[str | int, ...]) -> str:
        """Which default a value is that was not given."""
        usual = self.algorithm.name in WIDE and path in {("net", name) for name in WIDE_NET}
        return f"default for {self.algorithm.name}" if usual else super().default_origin(path)

    @property
    def offline(self) -> bool:
        """Whether it learns from a file."""
        return isinstance(self.algorithm, OfflineSpec)

    @property
    def frames_per_step(self) -> int:
        """Frames per rollout (T × N); of an offline algorithm gradient steps."""
        return self.algorithm.horizon if self.offline else self.algorithm.horizon * self.env.num_envs

    @property
    def steps(self) -> int:
        """Steps of the whole run, covering `train.frames`."""
        return -(-self.train.frames // self.frames_per_step)

    def affords(self, spent: int, cost: float, seen: int) -> bool:
        """Whether auto allows an evaluation of `cost` frames after `seen` of training, `spent` on earlier ones.

        The last evaluation has its share reserved; nothing here depends on the clock, so a resume repeats it.
        """
        now, whole = seen / EVALUATED_SHARE, self.train.frames / EVALUATED_SHARE
        return spent + cost <= now and spent + 2 * cost <= whole

    @property
    def evaluations(self) -> Cadence | None:
        """Cadence of evaluations: `every.eval`, or a twentieth of the run where it is auto."""
        if self.every.eval != "auto":
            return self.every.eval
        return Cadence(max(1, self.train.frames // AUTO_EVALUATIONS), "frames")

    @property
    def updates(self) -> int:
        """Gradient steps of the whole run, without early stopping."""
        if isinstance(self.algorithm, OffPolicySpec):
            learned = max(0, self.train.frames - self.algorithm.start)
            between = self.env.num_envs * self.algorithm.update_every
            return learned * self.algorithm.updates_at_once(self.env.num_envs) // between
        return self.steps * self.algorithm.updates_per_step(self.env.num_envs)

    def conflicts(self) -> Iterator[Conflict]:
        """Conflicting sizes, warm-ups longer than the run, network options an algorithm does not support."""
        yield from warmup_conflicts(self.algorithm, self.steps, "algorithm")
        if isinstance(self.algorithm, PPOSpec):
            yield from self._minibatch_conflicts(self.algorithm)
        if isinstance(self.algorithm, OffPolicySpec):
            yield from self._replay_conflicts(self.algorithm)
        if self.offline and (self.env.normalize_reward or self.init is not None):
            field = ("env", "normalize_reward") if self.env.normalize_reward else ("init",)
            yield Conflict(field, f"{self.algorithm.name} does not support it: it learns from a file")
        if self.net.shared and isinstance(self.algorithm, ActorCriticSpec | OfflineCriticSpec):
            reason = f"{self.algorithm.name} does not support it: policy and critics have separate networks"
            yield Conflict(("net", "shared"), reason)
        if self.net.recurrent is not None and not isinstance(self.algorithm, PPOSpec | A2CSpec | DQNSpec | SACSpec):
            yield Conflict(("net", "recurrent"), f"{self.algorithm.name} does not support it: use ppo, a2c, dqn or sac")
        yield from self._net_conflicts()
        yield from self._hook_conflicts()
        if self.env.id.startswith(PETTINGZOO):
            yield from self._agents_conflicts()
        elif self.env.policies > 1:
            yield Conflict(("env", "policies"), f"expected 1: {self.env.id} has one agent; `pettingzoo:` has several")
        yield from self._vector_conflicts()
        if self.cluster.environments > self.env.num_envs:
            yield Conflict(("cluster", "environments"), f"expected at most `env.num_envs` = {self.env.num_envs}")
        if isinstance(self.algorithm, PPOSpec) and self.algorithm.staleness:
            yield from self._staleness_conflicts()
        elif self.cluster.environments and self.env.vectorize != "async":
            yield Conflict(("env", "vectorize"), "expected async, because `cluster.environments` places single copies")

    def _hook_conflicts(self) -> Iterator[Conflict]:
        elsewhere = self.offline or getattr(self.algorithm, "staleness", 0)
        why = "it learns from a file" if self.offline else "with algorithm.staleness other processes step them"
        for field in ("on_step", "on_episode"):
            if getattr(self, field) and elsewhere:
                yield Conflict((field,), f"expected none, because this process steps no training environments: {why}")

    def _vector_conflicts(self) -> Iterator[Conflict]:
        """Of environments that step as one: no wrapper reaches the single ones."""
        env, jax = self.env, self.env.id.startswith(JAX)
        if jax and env.vectorize != "auto":
            yield Conflict(("env", "vectorize"), f"expected auto: {env.id} steps all its copies as one program")
        if not jax and env.vectorize != "envpool":
            return
        unset = {"frame_stack": None, "components": [], "reward_weights": None}
        for field in (name for name, value in unset.items() if getattr(env, name) != value):
            yield Conflict(("env", field), f"expected none: {'JAX' if jax else 'EnvPool'} steps all copies as one")

    def _agents_conflicts(self) -> Iterator[Conflict]:
        """Of several agents in one environment, whose games are stepped in this process."""
        env, why = self.env, "environments of several agents do not support it"
        if env.vectorize not in ("auto", "sync"):
            yield Conflict(("env", "vectorize"), f"expected auto or sync: {why}")
        unset = {"frame_stack": None, "components": [], "reward_weights": None}
        for field in (name for name, value in unset.items() if getattr(env, name) != value):
            yield Conflict(("env", field), f"expected none: {why}; wrap the game itself")
        if self.cluster.environments and not getattr(self.algorithm, "staleness", 0):
            yield Conflict(("cluster", "environments"), f"expected 0 without algorithm.staleness: {why}")
        single = self.net.recurrent is None and self.net.graph is None
        if env.policies > 1 and not (single and isinstance(self.algorithm, PPOSpec | A2CSpec)):
            yield Conflict(("env", "policies"), "expected 1, or ppo or a2c without net.recurrent and net.graph")
        if getattr(self.algorithm, "her", None) is not None or self.offline:
            yield Conflict(("algorithm", "her" if not self.offline else "name"), f"expected another: {why}")

    def _net_conflicts(self) -> Iterator[Conflict]:
        net, algorithm = self.net, self.algorithm
        if net.shared and net.critic_hidden is not None:
            reason = "expected null: with net.shared the critic has no hidden layers of its own"
            yield Conflict(("net", "critic_hidden"), reason)
        if net.graph is not None and net.critic_hidden is not None:
            yield Conflict(("net", "critic_hidden"), "expected null: net.graph replaces all hidden layers")
        if net.recurrent is not None and isinstance(algorithm, PPOSpec) and algorithm.minibatch % algorithm.horizon:
            reason = f"expected a multiple of the horizon ({algorithm.horizon}), because a recurrent policy trains on "
            yield Conflict(("algorithm", "minibatch"), f"{reason}whole sequences; got {algorithm.minibatch}")
        if net.recurrent is not None and isinstance(algorithm, PPOSpec | A2CSpec) and algorithm.self_imitation:
            reason = "expected null: it replays single transitions, without the state of net.recurrent"
            yield Conflict(("algorithm", "self_imitation"), reason)

    def _staleness_conflicts(self) -> Iterator[Conflict]:
        if not self.cluster.environments:
            reason = "expected at least 1, the number of processes that collect while this one learns"
            yield Conflict(("cluster", "environments"), f"{reason}, because of algorithm.staleness")
        if self.env.vectorize == "async":
            reason = "expected auto, sync or vector: with algorithm.staleness each process steps its own environments"
            yield Conflict(("env", "vectorize"), reason)
        if self.net.recurrent is not None:
            yield Conflict(("algorithm", "staleness"), "expected 0, because net.recurrent learns from its own rollouts")

    def _minibatch_conflicts(self, algorithm: PPOSpec) -> Iterator[Conflict]:
        size, batch, at = algorithm.minibatch, self.frames_per_step, ("algorithm", "minibatch")
        product = f"horizon × num_envs = {algorithm.horizon} × {self.env.num_envs} = {batch}"
        if size > batch:
            yield Conflict(at, f"expected at most {product}, got {size}")
        elif batch % size:
            near = sorted({max(d for d in _divisors(batch) if d < size), min(d for d in _divisors(batch) if d > size)})
            yield Conflict(at, f"expected a divisor of {product}, such as {near[0]} or {near[1]}; got {size}")
        elif size == 1 and algorithm.normalize_advantages:
            yield Conflict(at, "expected at least 2, because one advantage cannot be normalized")

    def _sequence_conflicts(self, algorithm: DQNSpec | SACSpec) -> Iterator[Conflict]:
        """Of a recurrent network that learns from sequences of a replay memory."""
        length, least = algorithm.sequence.length, self.env.num_envs * algorithm.sequence.rows
        if algorithm.batch % length:
            reason = f"expected a multiple of sequence.length ({length}), because net.recurrent trains on sequences"
            yield Conflict(("algorithm", "batch"), f"{reason}; got {algorithm.batch}")
        if algorithm.start < least:
            reason = f"expected at least num_envs × (length + burn_in) = {least}, a sequence of each environment"
            yield Conflict(("algorithm", "start"), f"{reason}; got {algorithm.start}")
        for name, usual in (("n_step", 1), ("prioritized", None), ("her", None), ("noisy", None)):
            if getattr(algorithm, name, usual) != usual:
                yield Conflict(("algorithm", name), f"expected {usual or 'null'}: net.recurrent does not support it")

    def _replay_conflicts(self, algorithm: OffPolicySpec) -> Iterator[Conflict]:
        n = self.env.num_envs
        if self.net.recurrent is not None and isinstance(algorithm, DQNSpec | SACSpec):
            yield from self._sequence_conflicts(algorithm)
        exact = algorithm.replay_ratio * n * algorithm.update_every
        if algorithm.updates_at_once(n) < 1 or abs(exact - round(exact)) > 1e-6:
            reason = (
                f"expected a whole number of gradient steps, at least 1, every {algorithm.update_every} vector steps; "
                f"replay_ratio × num_envs × update_every is {exact:g}"
            )
            yield Conflict(("algorithm", "replay_ratio"), reason)
        if algorithm.horizon % algorithm.update_every:
            reason = f"expected a multiple of update_every ({algorithm.update_every}), got {algorithm.horizon}"
            yield Conflict(("algorithm", "horizon"), reason)
        if algorithm.her is not None and algorithm.n_step > 1:
            yield Conflict(("algorithm", "n_step"), "expected 1, because `her` relabels single transitions")
        if algorithm.her is not None and self.env.frame_stack is not None:
            yield Conflict(
                ("env", "frame_stack"), "expected null, because `algorithm.her` relabels single observations"
            )
        if algorithm.buffer < (least := max(algorithm.start, n * (algorithm.n_step + 1))):
            yield Conflict(("algorithm", "buffer"), f"expected at least {least}, got {algorithm.buffer}")

    def derived(self) -> dict[str, int | float | str]:
        """Frames, steps and gradient steps, per step and in total; evaluation."""
        budget, when = self.train.frames // EVALUATED_SHARE, self.evaluations
        within = f" at most, within {budget:,} frames" if self.every.eval == "auto" else ""
        return {
            "frames per step": self.frames_per_step,
            "steps": self.steps,
            "frames in total": self.steps * self.frames_per_step,
            "gradient steps per step": self.algorithm.updates_per_step(self.env.num_envs),
            "gradient steps in total": self.updates,
            "evaluation": f"{self.eval.episodes} episodes {f'every {when}' if when else 'at the end'}{within}",
        }


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in small]
