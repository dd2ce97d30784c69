"""The critic: what it may have read, how it learns, and that it goes on from where it was."""

import pytest
import torch
from posttrain_cases import MAX_NEW_TOKENS, algorithm, answer, groups_of, random_groups
from small_lm import VOCAB, small_model

from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.scorer import ScalarModel
from palestra.posttrain.batch import pack, with_advantages
from palestra.posttrain.critic import Critic, expected, value_averages, value_denominator, value_loss_function
from palestra.spec.algorithm import CriticSpec
from palestra.spec.kinds.posttrain import PosttrainTrain
from palestra.spec.lm import AdamWSpec

TRAIN = PosttrainTrain(steps=100, micro_tokens=40)
PPO = algorithm("ppo")


def scalar_model(seed=0):
    model = ScalarModel(small_model(seed).requires_grad_(True))
    with torch.no_grad():
        model.value.weight.copy_(torch.randn(model.value.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def critic_of(spec=PPO, train=TRAIN):
    return Critic(small_model(1).requires_grad_(True), spec, train)


def prepared(groups, spec=PPO, values=None):
    batch = pack(groups, spec)
    values = torch.zeros(len(batch.tokens)) if values is None else values
    return with_advantages(batch, spec, max_new_tokens=MAX_NEW_TOKENS, values=values)


def test_expected_before_a_token_does_not_know_it_and_knows_those_before():
    """An off-by-one here would give each token the value of its own outcome as its baseline."""
    model = scalar_model()
    tokens = [3, 4, 5, 6, 7]
    batch = Batch.pack([tokens], [[0, 0, 1, 1, 1]])
    values, _ = expected(model, batch)
    assert values[:2].tolist() == [0.0, 0.0]
    for place in range(5):
        other = tokens.copy()
        other[place] = 9
        changed, _ = expected(model, Batch.pack([other], [[0, 0, 1, 1, 1]]))
        same = (changed - values).abs() < 1e-6
        assert same.tolist() == [True, True] + [t <= place for t in (2, 3, 4)]


def test_expected_is_what_the_model_says_one_token_before():
    model = scalar_model()
    batch = pack(random_groups(4, vocab=VOCAB), PPO)
    values, _ = expected(model, batch)
    shifted = torch.cat((torch.zeros(1), model.values(batch)[:-1]))
    torch.testing.assert_close(values, shifted * batch.loss_mask)


def test_critic_values_do_not_depend_on_micro_batches():
    batch = pack(random_groups(4, vocab=VOCAB), PPO)
    critics = [critic_of(train=TRAIN.model_copy(update={"micro_tokens": n})) for n in (1, 10**6)]
    for critic in critics:
        torch.nn.init.normal_(critic.engine.model.value.weight, generator=torch.Generator().manual_seed(0))
    one, other = (critic.values(batch) for critic in critics)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert one.abs().sum() > 0


def gradient(batches, size, micro_tokens, clip=None):
    model = scalar_model()
    optimizer = Optimizer(model, AdamWSpec(name="adamw"), 10)
    engine = TrainEngine(model, optimizer, Ranks(), micro_tokens=micro_tokens, flops_per_token=1.0)
    rows = [engine.forward_backward(b, value_loss_function(CriticSpec(clip=clip)), size) for b in batches]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, {name: sum(float(row[name]) for row in rows) for name in rows[0]}


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_gradient_of_any_split_is_that_of_the_whole(clip):
    groups = random_groups(4, vocab=VOCAB)
    batch = prepared(groups, values=torch.rand(sum(pack(groups, PPO).lengths)))
    size = value_denominator(batch)
    assert size == batch.loss_mask.sum()
    whole, told = gradient([batch], size, 10**6, clip)
    group = batch.per_sequence["group"]
    halves = [batch.select((group % 2 == odd).nonzero()[:, 0].tolist()) for odd in (0, 1)]
    for batches, micro in (([batch], 1), (halves, 30)):
        found, other = gradient(batches, size, micro, clip)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
        assert value_averages(other) == pytest.approx(value_averages(told), rel=1e-4)


@pytest.mark.parametrize(
    ("value", "clip", "loss"),
    # Before 0.5, return 1: moved by less than the clip, by more towards the return, by more away from it.
    [(0.6, 0.2, 0.16), (0.9, 0.2, 0.09), (0.9, None, 0.01), (0.0, 0.2, 1.0), (0.0, None, 1.0)],
)
def test_value_loss_by_hand(value, clip, loss):
    model = scalar_model()
    batch = prepared(groups_of([answer([-1.0], 1.0)]), values=torch.tensor([0.0, 0.5]))
    with torch.no_grad():
        now, _ = expected(model, batch)
        model.value.weight.mul_(value / float(now[1]))
    assert batch.per_token["returns"].tolist() == [0.0, 1.0]
    found = value_loss_function(CriticSpec(clip=clip))(model, batch)
    # The larger of the error and of the clipped error: 0.9 moves to 0.7 at most.
    assert found.total.item() == pytest.approx(loss, abs=1e-5)
    half = value_loss_function(CriticSpec(clip=clip, coefficient=0.5))(model, batch)  # as AReaL has it
    assert half.total.item() == pytest.approx(loss / 2, abs=1e-5)


def test_value_averages_explain_what_was_foreseen():
    returns, values = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0.1, 0.9, 2.1, 2.9])

    def told(values):
        sums = {
            "tokens": torch.tensor(4.0),
            "value": values.sum(),
            "return": returns.sum(),
            "return_squared": returns.square().sum(),
            "error": (returns - values).sum(),
            "error_squared": (returns - values).square().sum(),
            "clipped": torch.tensor(0.0),
            "loss": torch.tensor(7.0),
        }
        return value_averages({name: value / 3 for name, value in sums.items()})

    assert told(returns)["explained"] == pytest.approx(1.0)
    assert told(values)["explained"] == pytest.approx(1 - 0.01 / 1.25)
    assert told(torch.full((4,), 9.0))["explained"] == pytest.approx(0.0, abs=1e-5)
    assert told(values)["return"] == pytest.approx(1.5)
    assert told(values)["loss"] == pytest.approx(7 / 3)


def test_critic_learns_to_expect_the_mean_first_and_the_outcome_once_it_shows():
    """One prompt, two answers: before the first token nobody knows which it will be, after it everybody does."""
    answers = [answer([-1.0] * 2, 1.0, tokens=[5, 6]), answer([-1.0] * 2, 0.0, tokens=[8, 9])] * 4
    spec = algorithm("ppo", critic={"lr": 3e-3})
    critic, batch = critic_of(spec), pack(groups_of(answers), spec)
    for step in range(100):
        told = critic.learn(prepared(groups_of(answers), spec, critic.values(batch)), step / 100)
    values = critic.values(batch)[batch.loss_mask > 0].reshape(-1, 2)
    torch.testing.assert_close(values[:, 0], torch.full((8,), 0.5), atol=0.1, rtol=0.0)
    torch.testing.assert_close(values[:, 1], torch.tensor([1.0, 0.0] * 4), atol=0.1, rtol=0.0)
    assert told["critic/explained"] == pytest.approx(0.5, abs=0.1)


def test_critic_continues_from_its_state():
    """AReaL never restored the critic: a resumed run began it anew."""
    groups = random_groups(4, vocab=VOCAB)
    one = critic_of()
    for step in range(3):
        one.learn(prepared(groups, values=one.values(pack(groups, PPO))), step / 100)
    saved = {
        "model": {name: tensor.clone() for name, tensor in one.state()["model"].items()},
        "engine": one.state()["engine"],
    }
    other = critic_of()
    other.load_state(saved)
    for critic in (one, other):
        critic.learn(prepared(groups, values=critic.values(pack(groups, PPO))), 0.03)
    assert torch.equal(one.values(pack(groups, PPO)), other.values(pack(groups, PPO)))


def test_critic_of_an_algorithm_without_one_raises():
    with pytest.raises(ValueError, match="no critic"):
        critic_of(algorithm("grpo"))
