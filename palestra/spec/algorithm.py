"""Post-training algorithms as data: their parts, presets with their papers, and conflicts."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from palestra.spec.base import Function
from palestra.spec.model import Conflict, Model
from palestra.spec.schedule import Rate, constant

_CLIP = {"type": "clip", "low": 0.2, "high": 0.2}
_CISPO = {"type": "clipped_weight", "high": 5.0}
_GRPO = {"baseline": "group", "scale": "group_std", "trust": _CLIP, "aggregation": "token"}
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, Shao et al. 2024, arXiv 2402.03300, with its β. It names no ε: PPO's.
    "grpo": _GRPO | {"aggregation": "sequence", "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.04}},
    # Understanding R1-Zero-like training, Liu et al. 2025, arXiv 2503.20783: no division by std or by length.
    "dr_grpo": _GRPO | {"scale": "none", "aggregation": "constant"},
    # DAPO, Yu et al. 2025, arXiv 2503.14476: clip-higher, token mean, dynamic sampling, overlong shaping (its buffer is
    # 4,096 of 20,480 tokens). The paper's formula averages within a prompt, its code over the batch: as the code.
    "dapo": _GRPO
    | {
        "trust": {"type": "clip", "low": 0.2, "high": 0.28},
        "truncated": {"type": "penalize", "buffer": 0.2, "factor": 1.0},
        "filters": {"zero_variance": True},
    },
    # GSPO, Zheng et al. 2025, arXiv 2507.18071, with the bounds of its experiments.
    "gspo": _GRPO
    | {"ratio": "sequence", "trust": {"type": "clip", "low": 3e-4, "high": 4e-4}, "aggregation": "sequence"},
    # MiniMax-M1, 2025, arXiv 2506.13585: no lower bound; the upper one is not given: ScaleRL's.
    "cispo": _GRPO | {"trust": _CISPO},
    # Back to basics, Ahmadian et al. 2024, arXiv 2402.14740: REINFORCE over whole completions, so every token has the
    # same weight whatever the completion's length. For learned rewards it also subtracts β·k1 from the reward (`kl`).
    "rloo": {"baseline": "leave_one_out", "scale": "none", "trust": {"type": "none"}, "aggregation": "constant"},
    # REINFORCE++, Hu et al. 2025, arXiv 2501.03262: normalized over the whole batch; β for mathematics.
    "reinforce_pp": _GRPO
    | {"baseline": "batch", "scale": "batch_std", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001}},
    # Tricks or traps, Liu et al. 2025, arXiv 2508.08221: the group's mean, the batch's std, token mean.
    "lite_ppo": _GRPO | {"scale": "batch_std"},
    # SAPO, Qwen team 2025, arXiv 2511.20347: a sigmoid in place of the clip.
    "sapo": _GRPO | {"trust": {"type": "soft_gate", "positive": 1.0, "negative": 1.05}, "aggregation": "sequence"},
    # Prosperity before collapse, Zheng et al. 2025, arXiv 2510.01161, with its τ.
    "m2po": _GRPO | {"trust": {"type": "m2_mask", "threshold": 0.04}},
    # Rethinking the trust region in LLM RL, 2026, arXiv 2602.04879: Binary-TV. Advantages as in prime-rl.
    "dppo": _GRPO | {"scale": "none", "trust": {"type": "tv_mask", "threshold": 0.2}},
    # The art of scaling RL compute, Khatri et al. 2025, arXiv 2510.13786: CISPO, each prompt weighs the same.
    "scalerl": _GRPO
    | {"scale": "advantage_std", "trust": _CISPO, "aggregation": "prompt", "filters": {"zero_variance": True}},
    # PPO, Schulman et al. 2017, arXiv 1707.06347, with γ = λ = 1 as for a reward at the end of a completion.
    "ppo": _GRPO | {"baseline": "critic", "scale": "batch_std"},
}
"""What each preset sets; everything else has the default of its field."""


Preset = Literal[tuple(PRESETS)]  # pyrefly: ignore[invalid-literal]


class ClipSpec(Model):
    """PPO's clipped loss -min(r·A, clip(r, 1 - low, 1 + high)·A) with ratio r and advantage A."""

    type: Literal["clip"]
    """Type of the trust region."""
    low: float = Field(default=0.2, ge=0, le=1)
    """Lower clip range ε: the ratio is clipped at 1 - low."""
    high: float = Field(default=0.2, ge=0)
    """Upper clip range ε: the ratio is clipped at 1 + high."""
    dual: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages (dual clip, Ye et al. 2020); null: none."""


class TvMaskSpec(Model):
    """Loss -r·A, masking tokens whose probability has already moved too far in the advantage's direction (DPPO)."""

    type: Literal["tv_mask"]
    """Type of the trust region."""
    threshold: float = Field(default=0.2, gt=0, le=1)
    """Largest change of a token's probability that is still trained on."""


class M2MaskSpec(Model):
    """Loss -r·A, masking the tokens with the largest (log r)² until the batch mean is below the threshold (M2PO)."""

    type: Literal["m2_mask"]
    """Type of the trust region."""
    threshold: float = Field(default=0.04, gt=0)
    """Largest batch mean of (log r)²."""


class SoftGateSpec(Model):
    """Loss -(4/τ)·σ(τ·(r - 1))·A: the gradient fades smoothly as the ratio leaves 1 (SAPO)."""

    type: Literal["soft_gate"]
    """Type of the trust region."""
    positive: float = Field(default=1.0, gt=0)
    """Temperature τ for positive advantages; larger fades sooner."""
    negative: float = Field(default=1.05, gt=0)
    """Temperature τ for negative advantages."""


class ClippedWeightSpec(Model):
    """Loss -sg(clip(r, low, high))·A·log π with a stop-gradient weight: every token keeps a gradient (CISPO)."""

    type: Literal["clipped_weight"]
    """Type of the trust region."""
    low: float = Field(default=0.0, ge=0, le=1)
    """Lower bound of the weight."""
    high: float = Field(default=5.0, ge=1)
    """Upper bound of the weight."""


class NoTrustSpec(Model):
    """Loss -r·A without a trust region."""

    type: Literal["none"]
    """Type of the trust region."""


TrustSpec = ClipSpec | TvMaskSpec | M2MaskSpec | SoftGateSpec | ClippedWeightSpec | NoTrustSpec

Level = Literal["token", "sequence", "geometric"]


class NoCorrectionSpec(Model):
    """No importance weights."""

    type: Literal["none"]
    """Type of the correction."""


class TruncateSpec(Model):
    """Truncated importance sampling: tokens are weighted by min(ρ, high), ρ = anchor / behavior."""

    type: Literal["truncate"]
    """Type of the correction."""
    high: float = Field(default=2.0, ge=1)
    """Upper bound of the weight."""
    level: Level = "token"
    """ρ per token, its product over the completion, or its geometric mean over the completion."""


class MaskSpec(Model):
    """Masked importance sampling: weight ρ where low ≤ ρ ≤ high, else 0 (IcePop, arXiv 2510.18855)."""

    type: Literal["mask"]
    """Type of the correction."""
    low: float = Field(default=0.5, ge=0, le=1)
    """Lower bound of ρ."""
    high: float = Field(default=5.0, ge=1)
    """Upper bound of ρ."""
    level: Level = "token"
    """ρ per token, its product over the completion, or its geometric mean over the completion."""


class BinaryKlMaskSpec(Model):
    """Weight ρ where the binary KL between anchor and behavior is below the threshold in both directions (KPop)."""

    type: Literal["binary_kl"]
    """Type of the correction."""
    threshold: float = Field(default=0.1, gt=0)
    """Largest binary KL ("this token or another") in either direction (φ)."""


CorrectionSpec = NoCorrectionSpec | TruncateSpec | MaskSpec | BinaryKlMaskSpec


class KlSpec(Model):
    """KL penalty to the reference model."""

    where: Literal["none", "loss", "reward"] = "none"
    """No penalty, a term of the loss, or subtracted from each token's reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of KL(policy ‖ reference) from the sampled tokens."""
    coefficient: float = Field(default=0.0, ge=0)
    """Coefficient β."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.where == "none" and self.coefficient:
            reason = "expected 0, or `where: loss` or `where: reward`; with `where: none` it is not used"
            yield Conflict(("coefficient",), reason)
        if self.where != "none" and not self.coefficient:
            yield Conflict(("coefficient",), f"expected more than 0, or `where: none` in place of `{self.where}`")
        if self.where == "loss" and self.estimator == "k1":
            yield Conflict(("estimator",), "expected k2 or k3: the expected gradient of k1 in a loss is 0")


class KeepSpec(Model):
    """Train on truncated completions like on others."""

    type: Literal["keep"]
    """Handling of truncated completions."""


class MaskTruncatedSpec(Model):
    """Truncated completions count in their group's baseline but are masked in the loss."""

    type: Literal["mask"]
    """Handling of truncated completions."""


class PenalizeSpec(Model):
    """DAPO's soft overlong punishment: reward falls as a completion nears max_new_tokens."""

    type: Literal["penalize"]
    """Handling of truncated completions."""
    buffer: float = Field(default=0.2, gt=0, le=1)
    """Last fraction of max_new_tokens, over which the penalty grows linearly from 0."""
    factor: float = Field(default=1.0, gt=0)
    """Penalty of a truncated completion."""


TruncatedSpec = KeepSpec | MaskTruncatedSpec | PenalizeSpec


class FiltersSpec(Model):
    """Filters on groups; filtered groups are replaced by further prompts (dynamic sampling)."""

    zero_variance: bool = False
    """Drop groups whose rewards are all equal."""
    min_tokens: int | None = Field(default=None, ge=1)
    """Drop groups with a completion shorter than this; null: no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Drop groups with a completion longer than this; null: no limit."""
    function: Function | None = None
    """Your own function, as module:function: `def keep(group) -> bool`."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield Conflict(("min_tokens",), f"expected at most filters.max_tokens = {self.max_tokens}")


class CriticSpec(Model):
    """Value model, which predicts the return at each token."""

    lr: Rate = constant(1e-5)
    """Learning rate (AdamW)."""
    clip: float | None = Field(default=None, gt=0)
    """Value clipping range, as PPO2; null: no clipping."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the squared error; 0.5 is the ½ of AReaL and verl."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (γ)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation, or the input of `lam_strategy`."""
    lam_strategy: Literal["constant", "length", "position"] = "constant"
    """λ = lam; 1 - 1 / (lam · n) for n trained tokens (VAPO, arXiv 2504.05118); or lam ** (1 / (n - 1)), AReaL's."""
    returns_lam: float | None = Field(default=None, ge=0, le=1)
    """λ of the value targets (VAPO: 1); null: that of the advantages."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.lam_strategy != "constant" and self.lam == 0:
            yield Conflict(("lam",), f"expected more than 0, because of `lam_strategy: {self.lam_strategy}`")


class TurnsSpec(Model):
    """Credit of an episode's turns, from the reward of each."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """One advantage for all turns; or one each, of the rewards that follow, against the group's at the same turn."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn (γ)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation over turns, with `credit: turn` and a value model."""


class AlgorithmSpec(Model):
    """The policy-gradient algorithm. Keys not given take the preset's values, else the defaults."""

    preset: Preset
    """Published algorithm whose settings apply unless given here."""
    baseline: Literal["group", "leave_one_out", "batch", "critic", "none"] = "group"
    """Advantage baseline: group mean, mean of the group's other completions, batch mean, value model, or 0."""
    scale: Literal["none", "group_std", "batch_std", "advantage_std"] = "none"
    """Advantage scale: divide by the standard deviation of the group's or batch's rewards, or of the advantages."""
    std: Literal["sample", "population"] = "sample"
    """Standard deviation of the sample (n - 1; AReaL, TRL, verl) or of the population (n)."""
    reward_norm: Literal["none", "group", "batch"] = "none"
    """First normalize rewards to mean 0 and standard deviation 1, per group or over the batch."""
    advantage_norm: Literal["none", "batch"] = "none"
    """Last normalize the advantages of all trained tokens to mean 0 and standard deviation 1."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio π / anchor per token, or its geometric mean over the completion (GSPO)."""
    anchor: Literal["behavior", "recomputed"] = "behavior"
    """Denominator of the ratio: log-probabilities at sampling time, or recomputed at the start of the batch."""
    trust: Annotated[TrustSpec, Field(discriminator="type")] = NoTrustSpec(type="none")
    """Trust region around the anchor."""
    correction: Annotated[CorrectionSpec, Field(discriminator="type")] = NoCorrectionSpec(type="none")
    """Importance weights anchor / behavior; with `anchor: recomputed` the default is `truncate` at 2."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """Loss aggregation: mean over tokens, completions or prompts; or sum / (completions · max_new_tokens)."""
    kl: KlSpec = KlSpec()
    """KL penalty to the reference model."""
    entropy: float = Field(default=0.0, ge=0)
    """Entropy bonus coefficient."""
    log_ratio_penalty: float = Field(default=0.0, ge=0)
    """τ of τ·(log π / behavior)², added to each token's loss; prime-rl: 1e-3."""
    truncated: Annotated[TruncatedSpec, Field(discriminator="type")] = KeepSpec(type="keep")
    """Handling of completions truncated at max_new_tokens."""
    filters: FiltersSpec = FiltersSpec()
    """Which groups to drop and replace."""
    critic: CriticSpec | None = None
    """Value model of `baseline: critic`."""
    turns: TurnsSpec = TurnsSpec()
    """Credit in episodes of several turns."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        """Merge the given keys over the preset's, so that a resolved spec shows every value."""
        if not isinstance(data, Mapping) or data.get("preset") not in get_args(Preset):
            return data
        merged = _merged(PRESETS[data["preset"]], data)
        if isinstance(data.get("kl"), Mapping) and data["kl"].get("where") == "none":
            merged["kl"] = data["kl"]  # switched off, whatever the preset has
        if merged.get("anchor") == "recomputed":
            # Without weights, stale completions would count as if the current policy had sampled them.
            merged.setdefault("correction", {"type": "truncate"})
        if merged.get("baseline") == "critic":
            merged.setdefault("critic", {})
        return merged

    @property
    def needs_group(self) -> bool:
        """Whether completions of one prompt are compared, so that a group needs several."""
        of_group = self.baseline in ("group", "leave_one_out") or self.scale == "group_std"
        return of_group or self.reward_norm == "group" or self.filters.zero_variance

    @property
    def needs_reference(self) -> bool:
        """Whether tokens are scored by the reference model."""
        return self.kl.where != "none"

    @property
    def needs_anchor(self) -> bool:
        """Whether tokens are scored by the policy at the start of the batch."""
        return self.anchor == "recomputed" or self.trust.type == "m2_mask"

    @property
    def needs_turns(self) -> bool:
        """Whether the rewards of turns are told apart."""
        return self.turns.credit == "turn" or self.turns.discount < 1

    def conflicts(self) -> Iterator[Conflict]:
        """Settings that conflict."""
        yield from self._turn_conflicts()
        if self.correction.type != "none" and self.anchor == "behavior":
            reason = "expected type: none, because with `anchor: behavior` the ratio has these weights in it already"
            yield Conflict(("correction",), reason)
        if self.ratio == "sequence" and self.aggregation != "sequence":
            reason = "expected sequence, because `ratio: sequence` gives each completion one loss"
            yield Conflict(("aggregation",), reason)
        if self.ratio == "sequence" and self.trust.type in ("tv_mask", "m2_mask"):
            yield Conflict(("ratio",), f"expected token, because `trust: {self.trust.type}` works on tokens")
        if self.scale not in _SCALES[self.baseline]:
            known = " or ".join(_SCALES[self.baseline])
            yield Conflict(("scale",), f"expected {known}, because of `baseline: {self.baseline}`")
        if self.critic is not None and self.baseline != "critic":
            yield Conflict(("critic",), f"expected null, because of `baseline: {self.baseline}`")
        if self.critic is None and self.baseline == "critic":
            yield Conflict(("critic",), "expected a mapping, because of `baseline: critic`")

    def _turn_conflicts(self) -> Iterator[Conflict]:
        by_turn = self.turns.credit == "turn"
        if self.turns.lam < 1 and not (by_turn and self.critic is not None):
            yield Conflict(("turns", "lam"), "expected 1, or `credit: turn` with `baseline: critic`, which use it")
        if by_turn and self.ratio == "sequence":
            reason = "expected trajectory, because `ratio: sequence` gives a completion one advantage"
            yield Conflict(("turns", "credit"), reason)
        if by_turn and self.reward_norm != "none":
            yield Conflict(("reward_norm",), "expected none, because with `turns.credit: turn` a turn has the reward")
        if by_turn and self.critic is not None:
            for name in ("gamma", "lam"):
                if getattr(self.critic, name) < 1:
                    reason = "expected 1, because `turns.credit: turn` discounts by turns: set `turns` in its place"
                    yield Conflict(("critic", name), reason)


_SCALES = {
    "group": ("none", "group_std", "batch_std", "advantage_std"),
    "leave_one_out": ("none", "group_std", "batch_std", "advantage_std"),
    "batch": ("none", "batch_std"),
    "critic": ("none", "batch_std"),
    "none": ("none",),  # the standard deviation of equal rewards is 0, and without a baseline they are not
}


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` merged over `base`; a mapping with another `type` replaces the whole block."""
    merged = {**base, **given}
    for key, value in given.items():
        below = base.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            replaces = "type" in value and value["type"] != below.get("type")
            merged[key] = dict(value) if replaces else _merged(below, value)
    return merged
