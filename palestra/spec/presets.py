"""The algorithms of post-training by name: what each sets of `AlgorithmSpec`, with its paper and its values."""

from typing import Any

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
        "truncated": {"type": "penalise", "buffer": 0.2, "factor": 1.0},
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
    # REINFORCE++, Hu et al. 2025, arXiv 2501.03262: normalised over the whole batch; β for mathematics.
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
