"""A search that takes seconds: CartPole, five trials, rungs at 2, 4 and 8 of 16 steps."""

from typing import Any

from conftest import SHORT

STEPS = 16
# One trial at a time and values that do not depend on scores: nothing depends on timing.
SEARCH: dict[str, Any] = {
    "trials": 5,
    "sampler": "random",
    "parallel": 1,
    "space": {"algorithm.lr": {"loguniform": [1e-4, 1e-2]}, "net.hidden": {"choice": [[8], [16, 16]]}},
    "pruner": {"asha": {"grace": 2, "reduction": 2, "by": "steps"}},
}
BASE: dict[str, Any] = {
    **SHORT,
    "algorithm": {**SHORT["algorithm"], "epochs": 1},
    "train": {"frames": STEPS * 128},
    "eval": {"episodes": 2, "num_envs": 2},
    "every": {"eval": "2 steps"},
    "search": SEARCH,
}
