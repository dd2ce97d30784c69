"""Networks that give the value of every action, with dueling streams or quantiles of the return where asked for."""

from collections.abc import Sequence

from torch import Tensor, nn

from palestra.control.actions import ActionHead
from palestra.control.actors import Actor
from palestra.control.layers import affine, linear
from palestra.control.trunks import Mlp, make_trunk
from palestra.spec.control.net import NetSpec


class QNet(Actor):
    """Q of every action of a Discrete space; acts greedily."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        head: ActionHead,
        spec: NetSpec,
        obs_scale: nn.Module | None = None,
        *,
        dueling: bool = False,
        quantiles: int = 1,
    ):
        super().__init__(head)
        gain = 1.0 if spec.orthogonal else None
        own = spec.hidden[-1:] if dueling else []  # of dueling streams the last hidden layer is each one's own
        self.trunk = make_trunk(obs_shape, spec, spec.hidden[: len(spec.hidden) - len(own)], obs_scale)
        sizes = [self.trunk.size, *own]
        self.advantage_stream = Mlp(sizes, spec) if own else None
        self.advantage_head = linear(sizes[-1], head.outputs * quantiles, gain)
        self.value_stream = Mlp(sizes, spec) if own else None
        self.value_head = linear(sizes[-1], quantiles, gain) if dueling else None
        self.shape = (head.outputs, quantiles)

    def forward(self, obs: Tensor) -> Tensor:
        """The quantiles of the return of every action, (B, A, quantiles); one quantile is the mean."""
        hidden = self.trunk.forward(obs)
        own = hidden if self.advantage_stream is None else self.advantage_stream.forward(hidden)
        values = affine(own, self.advantage_head.weight, self.advantage_head.bias).unflatten(1, self.shape)
        if self.value_head is None:
            return values
        own = hidden if self.value_stream is None else self.value_stream.forward(hidden)
        # Without the mean taken out, a constant could move between the two (Wang et al. 2016, eq. 9).
        return self.value_head(own).unsqueeze(1) + values - values.mean(dim=1, keepdim=True)

    def q(self, obs: Tensor) -> Tensor:
        """Q of every action, (B, A)."""
        return self.forward(obs).mean(dim=2)

    def greedy(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The actions of the highest Q."""
        q = self.q(obs)
        return (q if mask is None else q.masked_fill(~mask, float("-inf"))).argmax(dim=1)
