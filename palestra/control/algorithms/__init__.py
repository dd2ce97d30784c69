"""The algorithms by their name in a spec. Each is one file: what it stores, how it acts, how it learns."""

from palestra.control.algorithms.a2c import A2C
from palestra.control.algorithms.base import Algorithm
from palestra.control.algorithms.crossq import CrossQ
from palestra.control.algorithms.dqn import DQN
from palestra.control.algorithms.offline import BC, IQL, TD3BC
from palestra.control.algorithms.ppo import PPO
from palestra.control.algorithms.recurrent import RecurrentDQN, RecurrentSAC
from palestra.control.algorithms.reinforce import Reinforce
from palestra.control.algorithms.sac import SAC
from palestra.control.algorithms.sarsa import SARSA
from palestra.control.algorithms.td3 import TD3
from palestra.control.algorithms.tqc import TQC
from palestra.control.nets.heads import ActionHead
from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec

ALGORITHMS: dict[str, type[Algorithm]] = {
    "a2c": A2C,
    "dqn": DQN,
    "sarsa": SARSA,
    "ppo": PPO,
    "reinforce": Reinforce,
    "sac": SAC,
    "tqc": TQC,
    "td3": TD3,
    "crossq": CrossQ,
    "bc": BC,
    "td3_bc": TD3BC,
    "iql": IQL,
}

RECURRENT: dict[str, type[Algorithm]] = {"dqn": RecurrentDQN, "sac": RecurrentSAC}
"""Those that learn in another way with recurrent networks."""


def algorithm_of(spec: ControlSpec) -> type[Algorithm]:
    """The algorithm of a spec."""
    name = spec.algorithm.name
    return ALGORITHMS[name] if spec.net.recurrent is None else RECURRENT.get(name, ALGORITHMS[name])


def check_actions(spec: ControlSpec, head: ActionHead) -> None:
    """Refuse an algorithm that cannot act in the environment's action space."""
    supported = ALGORITHMS[spec.algorithm.name].supports
    if head.kind not in supported:
        fitting = [name for name, algorithm in ALGORITHMS.items() if head.kind in algorithm.supports]
        raise UsageError(
            f"algorithm: {spec.algorithm.name} acts in spaces of type {', '.join(supported)}, and {spec.env.id} has "
            f"one of type {head.kind}: use {', '.join(fitting)}"
        )
