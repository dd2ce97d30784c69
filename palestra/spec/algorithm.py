"""Post-training algorithms as data: what each is made of, presets with their papers, what does not fit together."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from palestra.spec.base import Conflict, Function
from palestra.spec.lm import Rate
from palestra.spec.model import Model
from palestra.spec.schedule import Schedule

_CLIP = {"type": "clip", "low": 0.2, "high": 0.2}
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, Shao et al. 2024, arXiv 2402.03300, with its β. It names no ε: PPO's.
    "grpo": {
        "baseline": "group",
        "scale": "group_std",
        "trust": _CLIP,
        "aggregation": "sequence",
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.04},
    },
    # Understanding R1-Zero-like training, Liu et al. 2025, arXiv 2503.20783: no division by std or by length.
    "dr_grpo": {"baseline": "group", "scale": "none", "trust": _CLIP, "aggregation": "constant"},
    # DAPO, Yu et al. 2025, arXiv 2503.14476: clip-higher, token mean, dynamic sampling, overlong shaping (its buffer is
    # 4,096 of 20,480 tokens). The paper's formula averages within a prompt, its code over the batch: as the code.
    "dapo": {
        "baseline": "group",
        "scale": "group_std",
        "trust": {"type": "clip", "low": 0.2, "high": 0.28},
        "aggregation": "token",
        "truncated": {"type": "penalize", "buffer": 0.2, "factor": 1.0},
        "filters": {"zero_variance": True},
    },
    # GSPO, Zheng et al. 2025, arXiv 2507.18071, with the bounds of its experiments.
    "gspo": {
        "baseline": "group",
        "scale": "group_std",
        "ratio": "sequence",
        "trust": {"type": "clip", "low": 3e-4, "high": 4e-4},
        "aggregation": "sequence",
    },
    # MiniMax-M1, 2025, arXiv 2506.13585: no lower bound; it does not tell the upper one: as for ScaleRL.
    "cispo": {
        "baseline": "group",
        "scale": "group_std",
        "trust": {"type": "clipped_weight", "high": 5.0},
        "aggregation": "token",
    },
    # Back to basics, Ahmadian et al. 2024, arXiv 2402.14740: REINFORCE of whole answers, so that every token weighs the
    # same whatever the answer's length. For learned rewards it also takes β·k1 off the reward (`kl`).
    "rloo": {"baseline": "leave_one_out", "scale": "none", "trust": {"type": "none"}, "aggregation": "constant"},
    # REINFORCE++, Hu et al. 2025, arXiv 2501.03262: normalized over the whole batch; β for mathematics.
    "reinforce_pp": {
        "baseline": "batch",
        "scale": "batch_std",
        "trust": _CLIP,
        "aggregation": "token",
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
    },
    # Tricks or traps, Liu et al. 2025, arXiv 2508.08221: the group's mean, the batch's std, token mean.
    "lite_ppo": {"baseline": "group", "scale": "batch_std", "trust": _CLIP, "aggregation": "token"},
    # SAPO, Qwen team 2025, arXiv 2511.20347: a sigmoid in place of the clip.
    "sapo": {
        "baseline": "group",
        "scale": "group_std",
        "trust": {"type": "soft_gate", "positive": 1.0, "negative": 1.05},
        "aggregation": "sequence",
    },
    # Prosperity before collapse, Zheng et al. 2025, arXiv 2510.01161, with its τ.
    "m2po": {
        "baseline": "group",
        "scale": "group_std",
        "trust": {"type": "m2_mask", "threshold": 0.04},
        "aggregation": "token",
    },
    # Rethinking the trust region in LLM RL, 2026, arXiv 2602.04879: Binary-TV. Advantages as in prime-rl.
    "dppo": {
        "baseline": "group",
        "scale": "none",
        "trust": {"type": "tv_mask", "threshold": 0.2},
        "aggregation": "token",
    },
    # The art of scaling RL compute, Khatri et al. 2025, arXiv 2510.13786: CISPO, each prompt weighs the same.
    "scalerl": {
        "baseline": "group",
        "scale": "advantage_std",
        "trust": {"type": "clipped_weight", "high": 5.0},
        "aggregation": "prompt",
        "filters": {"zero_variance": True},
    },
    # PPO, Schulman et al. 2017, arXiv 1707.06347, with γ = λ = 1 as for a reward at the end of an answer.
    "ppo": {"baseline": "critic", "scale": "batch_std", "trust": _CLIP, "aggregation": "token"},
}
"""What each preset sets; everything else has the default of its field."""


Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "lite_ppo",
    "sapo",
    "m2po",
    "dppo",
    "scalerl",
    "ppo",
]

assert set(PRESETS) == set(get_args(Preset))


class ClipSpec(Model):
    """PPO's loss -min(r·A, clip(r, 1 - low, 1 + high)·A), r being the ratio and A the advantage."""

    type: Literal["clip"]
    """The trust region."""
    low: float = Field(default=0.2, ge=0, le=1)
    """How far below 1 the ratio counts."""
    high: float = Field(default=0.2, ge=0)
    """How far above 1 the ratio counts."""
    dual: float | None = Field(default=None, gt=1)
    """The largest ratio that counts for bad answers (dual clip, Ye et al. 2020); null sets no limit."""


class TvMaskSpec(Model):
    """The loss -r·A, without the tokens whose probability has moved too far the way the advantage pushes."""

    type: Literal["tv_mask"]
    """The trust region."""
    threshold: float = Field(default=0.2, gt=0, le=1)
    """By how much the probability of a token may have changed."""


class M2MaskSpec(Model):
    """The loss -r·A; at its start a batch loses the tokens with the largest (log r)², so that the mean is small."""

    type: Literal["m2_mask"]
    """The trust region."""
    threshold: float = Field(default=0.04, gt=0)
    """What that mean is at most."""


class SoftGateSpec(Model):
    """The loss -(4/τ)·σ(τ·(r - 1))·A, whose pull fades as the ratio leaves 1, on both sides."""

    type: Literal["soft_gate"]
    """The trust region."""
    positive: float = Field(default=1.0, gt=0)
    """τ for positive advantages; larger fades sooner."""
    negative: float = Field(default=1.05, gt=0)
    """τ for negative advantages."""


class ClippedWeightSpec(Model):
    """The loss -clip(r, low, high)·A·log π, the clipped ratio being a constant: every token keeps a gradient."""

    type: Literal["clipped_weight"]
    """The trust region."""
    low: float = Field(default=0.0, ge=0, le=1)
    """The least weight."""
    high: float = Field(default=5.0, ge=1)
    """The largest weight."""


class NoTrustSpec(Model):
    """The loss -r·A, without a trust region."""

    type: Literal["none"]
    """The trust region."""


TrustSpec = ClipSpec | TvMaskSpec | M2MaskSpec | SoftGateSpec | ClippedWeightSpec | NoTrustSpec

Level = Literal["token", "sequence", "geometric"]


class NoCorrectionSpec(Model):
    """No weights."""

    type: Literal["none"]
    """What becomes of the weights."""


class TruncateSpec(Model):
    """Tokens are weighted by min(ρ, high), ρ being anchor / behavior (truncated importance sampling)."""

    type: Literal["truncate"]
    """What becomes of the weights."""
    high: float = Field(default=2.0, ge=1)
    """The largest weight."""
    level: Level = "token"
    """ρ of each token, the product over the answer, or its geometric mean over the answer."""


class MaskSpec(Model):
    """Tokens are weighted by ρ where low ≤ ρ ≤ high, and left out elsewhere (arXiv 2510.18855)."""

    type: Literal["mask"]
    """What becomes of the weights."""
    low: float = Field(default=0.5, ge=0, le=1)
    """The least weight that counts."""
    high: float = Field(default=5.0, ge=1)
    """The largest weight that counts."""
    level: Level = "token"
    """ρ of each token, the product over the answer, or its geometric mean over the answer."""


class BinaryKlMaskSpec(Model):
    """Tokens are weighted by ρ where the binary KL between anchor and behavior is small both ways (KPop)."""

    type: Literal["binary_kl"]
    """What becomes of the weights."""
    threshold: float = Field(default=0.1, gt=0)
    """The largest KL, of "this token or another", either way (φ)."""


CorrectionSpec = NoCorrectionSpec | TruncateSpec | MaskSpec | BinaryKlMaskSpec


class KlSpec(Model):
    """How the policy is held near the model it started from."""

    where: Literal["none", "loss", "reward"] = "none"
    """Not at all, as a term of the loss, or taken off each token's reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How KL(policy ‖ reference) is estimated from the tokens drawn."""
    coefficient: float = Field(default=0.0, ge=0)
    """β."""


class KeepSpec(Model):
    """Answers that were cut off are trained on like others."""

    type: Literal["keep"]
    """What becomes of them."""


class MaskTruncatedSpec(Model):
    """Answers that were cut off count in the baseline of their group and are not trained on."""

    type: Literal["mask"]
    """What becomes of them."""


class PenalizeSpec(Model):
    """Answers lose reward as they near the limit on new tokens (DAPO's soft overlong punishment)."""

    type: Literal["penalize"]
    """What becomes of them."""
    buffer: float = Field(default=0.2, gt=0, le=1)
    """The last part of max_new_tokens, over which the loss grows from 0, as a fraction."""
    factor: float = Field(default=1.0, gt=0)
    """What an answer loses that was cut off."""


TruncatedSpec = KeepSpec | MaskTruncatedSpec | PenalizeSpec


class FiltersSpec(Model):
    """Groups that are not trained on; others take their place."""

    zero_variance: bool = False
    """Leave out groups whose rewards are all the same."""
    min_tokens: int | None = Field(default=None, ge=1)
    """Leave out groups with an answer of fewer tokens; null leaves out none."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Leave out groups with an answer of more tokens; null leaves out none."""
    function: Function | None = None
    """Your own function, as module:function: `def keep(group) -> bool`."""


class CriticSpec(Model):
    """A second model that learns what to expect before each token."""

    lr: Rate = Schedule(shape="constant", start=1e-5)
    """Its learning rate, with AdamW."""
    clip: float | None = Field(default=None, gt=0)
    """How far its values may move in a batch before they count no further; null sets no limit."""
    coefficient: float = Field(default=1.0, gt=0)
    """The weight of its squared error; 0.5 is the ½ of AReaL and verl."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """The discount a token (γ)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation, or what `lam_strategy` makes it of."""
    lam_strategy: Literal["constant", "length", "position"] = "constant"
    """λ = lam; 1 - 1 / (lam · n) for n trained tokens (VAPO, arXiv 2504.05118); or lam ** (1 / (n - 1)), AReaL's."""
    returns_lam: float | None = Field(default=None, ge=0, le=1)
    """λ of the returns that it learns (VAPO has 1); null takes that of the advantages."""


class AlgorithmSpec(Model):
    """What is learned from answers and their rewards. Keys not given have the preset's values, or else the defaults."""

    preset: Preset
    """The algorithm."""
    baseline: Literal["group", "leave_one_out", "batch", "critic", "none"] = "group"
    """What rewards are compared with: the group's mean, the mean of the others in it, the batch's, or a critic."""
    scale: Literal["none", "group_std", "batch_std", "advantage_std"] = "none"
    """What they are divided by then: the standard deviation of the group's or batch's rewards, or of advantages."""
    std: Literal["sample", "population"] = "sample"
    """Which standard deviation: the sample's (n - 1) as in AReaL, TRL and verl, or the population's (n)."""
    reward_norm: Literal["none", "group", "batch"] = "none"
    """Before all else bring rewards to mean 0 and standard deviation 1, within each group or the batch."""
    advantage_norm: Literal["none", "batch"] = "none"
    """After all else bring the advantages of all trained tokens to mean 0 and standard deviation 1."""
    ratio: Literal["token", "sequence"] = "token"
    """The ratio π / anchor of each token, or its geometric mean over each answer."""
    anchor: Literal["behavior", "recomputed"] = "behavior"
    """What the policy is compared with: what drew the tokens, or the policy at the start of the batch."""
    trust: Annotated[TrustSpec, Field(discriminator="type")] = NoTrustSpec(type="none")
    """What holds the policy near the anchor."""
    correction: Annotated[CorrectionSpec, Field(discriminator="type")] = NoCorrectionSpec(type="none")
    """Weights that make up for anchor ≠ behavior; with a recomputed anchor truncated at 2 unless you say otherwise."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """What weighs the same: each token, answer or prompt; or each token, divided by answers · max_new_tokens."""
    kl: KlSpec = KlSpec()
    """Holding the policy near the model it started from."""
    entropy: float = Field(default=0.0, ge=0)
    """Entropy bonus coefficient."""
    log_ratio_penalty: float = Field(default=0.0, ge=0)
    """τ of τ·(log π / behavior)², added to the loss of each token; prime-rl has 1e-3."""
    truncated: Annotated[TruncatedSpec, Field(discriminator="type")] = KeepSpec(type="keep")
    """What becomes of answers that were cut off."""
    filters: FiltersSpec = FiltersSpec()
    """Groups that are not trained on."""
    critic: CriticSpec | None = None
    """The critic of `baseline: critic`."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        """What was given over what the preset says, so that a resolved spec shows every value."""
        if not isinstance(data, Mapping) or data.get("preset") not in get_args(Preset):
            return data
        found = _merged(PRESETS[data["preset"]], data)
        if isinstance(data.get("kl"), Mapping) and data["kl"].get("where") == "none":
            found["kl"] = data["kl"]  # switched off: what the preset says of it is void
        if found.get("anchor") == "recomputed":
            # Without weights, answers of an older policy would count as if the newer one had drawn them.
            found.setdefault("correction", {"type": "truncate"})
        if found.get("baseline") == "critic":
            found.setdefault("critic", {})
        return found

    @property
    def needs_group(self) -> bool:
        """Whether answers to one prompt are compared, so that there must be several."""
        of_group = self.baseline in ("group", "leave_one_out") or self.scale == "group_std"
        return of_group or self.reward_norm == "group" or self.filters.zero_variance

    @property
    def needs_reference(self) -> bool:
        """Whether tokens are scored by the model the policy started from."""
        return self.kl.where != "none"

    @property
    def needs_anchor(self) -> bool:
        """Whether tokens are scored by the policy at the start of the batch."""
        return self.anchor == "recomputed" or self.trust.type == "m2_mask"

    def problems(self) -> list[Conflict]:
        """What does not fit together."""
        found = [Conflict(("kl", *path), reason) for path, reason in _kl_problems(self.kl)]
        if self.correction.type != "none" and self.anchor == "behavior":
            reason = "expected type: none, because with `anchor: behavior` the ratio has these weights in it already"
            found.append(Conflict(("correction",), reason))
        if self.ratio == "sequence" and self.aggregation != "sequence":
            reason = "expected sequence, because `ratio: sequence` gives each answer one loss"
            found.append(Conflict(("aggregation",), reason))
        if self.ratio == "sequence" and self.trust.type in ("tv_mask", "m2_mask"):
            reason = f"expected token, because `trust: {self.trust.type}` judges tokens"
            found.append(Conflict(("ratio",), reason))
        if self.scale not in _SCALES[self.baseline]:
            known = " or ".join(_SCALES[self.baseline])
            found.append(Conflict(("scale",), f"expected {known}, because of `baseline: {self.baseline}`"))
        if self.critic is not None and self.baseline != "critic":
            found.append(Conflict(("critic",), f"expected null, because of `baseline: {self.baseline}`"))
        if self.critic is None and self.baseline == "critic":
            found.append(Conflict(("critic",), "expected a mapping, because of `baseline: critic`"))
        if self.critic is not None and self.critic.lam_strategy != "constant" and self.critic.lam == 0:
            reason = f"expected more than 0, because of `lam_strategy: {self.critic.lam_strategy}`"
            found.append(Conflict(("critic", "lam"), reason))
        low, high = self.filters.min_tokens, self.filters.max_tokens
        if low is not None and high is not None and low > high:
            found.append(Conflict(("filters", "min_tokens"), f"expected at most filters.max_tokens = {high}"))
        return found


_SCALES = {
    "group": ("none", "group_std", "batch_std", "advantage_std"),
    "leave_one_out": ("none", "group_std", "batch_std", "advantage_std"),
    "batch": ("none", "batch_std"),
    "critic": ("none", "batch_std"),
    "none": ("none",),  # equal rewards, not centred, would be divided by 0
}


def _kl_problems(kl: KlSpec) -> list[Conflict]:
    if kl.where == "none":
        reason = "expected 0, or `where: loss` or `where: reward`: nothing uses it"
        return [Conflict(("coefficient",), reason)] if kl.coefficient else []
    found = []
    if not kl.coefficient:
        found.append(Conflict(("coefficient",), f"expected more than 0, or `where: none` in place of `{kl.where}`"))
    if kl.where == "loss" and kl.estimator == "k1":
        reason = "expected k2 or k3: on average the gradient of k1 in a loss is 0"
        found.append(Conflict(("estimator",), reason))
    return found


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `base`, mapping by mapping; one of another `type` replaces all that its place had."""
    found = {**base, **given}
    for key, value in given.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            replaces = "type" in value and value["type"] != below.get("type")
            found[key] = dict(value) if replaces else _merged(below, value)
    return found
