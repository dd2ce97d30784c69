"""Updates as CUDA graphs compute what they do without; a capture that runs shows the same on a CPU."""

from functools import partial
from pathlib import Path

import pytest
import torch

import palestra
from palestra.control import graphs
from palestra.control.algorithms import base

torch.set_num_threads(1)
EXAMPLES = Path(__file__).parent.parent / "examples" / "control"
OFF = ["train.frames=700", "algorithm.start=300", "algorithm.batch=32"]
CASES = {
    "ppo_cartpole_fast": ["train.frames=1024", "algorithm.horizon=64", "env.num_envs=4", "algorithm.minibatch=64"],
    "a2c_cartpole": ["train.frames=800"],
    "ppo_sil_cartpole": ["train.frames=2048"],
    "sac_pendulum": OFF,
    "td3_pendulum": OFF,
    "crossq_pendulum": OFF,
    "ddqn_per_cartpole": OFF,
    "rainbow_cartpole": OFF,
    "tqc_pendulum": OFF,
}
"""Specs, short."""


class Recorded:
    """In place of a graph: calls the function again with the tensors of the captured call, and counts."""

    def __init__(self) -> None:
        self.replayed = 0

    def __call__(self, run):
        def replay():
            self.replayed += 1
            return run()

        return replay


def weights(name: str, root: Path, device: str, *more: str) -> dict[str, torch.Tensor]:
    run = palestra.run(
        EXAMPLES / f"{name}.yaml", root=root, quiet=True, max_session=1,
        overrides=[*CASES[name], f"device={device}", "every.eval=null", "eval.episodes=1", "seed=3", *more],
    )  # fmt: skip
    return {name: t.cpu() for name, t in palestra.load(run, which="last").net.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_replayed_updates_learn_the_same_weights_bit_for_bit(name, tmp_path, monkeypatch):
    plain, recorded = weights(name, tmp_path / "plain", "cpu", "train.compile=off"), Recorded()
    monkeypatch.setattr(
        base.AlgorithmParts,
        "compiled",
        lambda self, method, compiles=True, kept=0: graphs.Graphed(method, kept, recorded),
    )
    replayed = weights(name, tmp_path / "replayed", "cpu", "train.compile=off")
    assert recorded.replayed > 3
    for key, values in plain.items():
        assert torch.equal(values, replayed[key]), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CASES)
def test_graphs_learn_the_same_weights_on_a_gpu(name, tmp_path):
    plain, graphed = (weights(name, tmp_path / mode, "cuda", f"train.compile={mode}") for mode in ("off", "on"))
    for key, values in plain.items():
        torch.testing.assert_close(values, graphed[key], rtol=1e-4, atol=1e-5, msg=key)


def test_arguments_elsewhere_are_copied_and_what_is_changed_comes_back():
    recorded = Recorded()

    def function(total, pair):
        total.add_(pair[0])
        return [total * 2, (pair[0] + 1, pair[1])]

    graphed, kept = graphs.Graphed(function, 0, recorded), []
    for number in range(6):
        total = torch.full((3,), float(number))
        out = graphed(total, (torch.ones(3) * number, None))
        assert torch.equal(total, torch.full((3,), 2.0 * number))
        kept.append(out)
    assert recorded.replayed == 4
    assert [out[0][0].item() for out in kept] == [4.0 * number for number in range(6)]
    assert kept[-1][1][1] is None


def test_other_shapes_are_captured_apart():
    recorded = Recorded()
    graphed = graphs.Graphed(partial(torch.mul, 2), 0, recorded)
    for size in (2, 3, 2, 3, 2, 3):
        assert torch.equal(graphed(torch.ones(size)), torch.full((size,), 2.0))
    assert recorded.replayed == 2
