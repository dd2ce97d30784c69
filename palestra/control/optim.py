"""Updates: Adam and its kin on one flat parameter vector, functional networks, compilation, matmul precision.

There are two forms of Adam. `adam_step` is a pure function, for the small networks of the on-policy algorithms.
`Trained.step` works in place, for vectors of 10⁵ numbers: it does not allocate them again, and its bias corrections
(`pace`), the same for all numbers, are computed outside of the graph.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from palestra.errors import UsageError
from palestra.rl.schedules import value
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.schedule import Schedule


class Rule(NamedTuple):
    """What tells Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019) and RMSprop apart, constant in a run."""

    beta1: float = 0.9
    beta2: float = 0.999
    corrected: bool = True
    """Whether the moments, which begin at 0, are scaled up in the first updates."""
    decay: float = 0.0
    """Times the learning rate it is the share of each parameter that an update takes away."""


ADAM = Rule()


def rule_of(spec: Any) -> Rule:
    """The rule of an algorithm's spec. RMSprop is Adam without a mean and without corrections, as in torch."""
    if spec.optimizer == "rmsprop":
        return Rule(0.0, 0.99, corrected=False)
    return Rule(getattr(spec, "beta1", ADAM.beta1), decay=spec.weight_decay if spec.optimizer == "adamw" else 0.0)


class Adam(NamedTuple):
    """The state of `adam_step`, all tensors, so that counting does not recompile."""

    mean: Tensor
    square: Tensor
    count: Tensor
    """Updates so far."""
    left: Tensor
    """1 − β₁ᵗ and 1 − β₂ᵗ of the next update, (2,). Computed one update ahead: in the same graph they would be computed
    again for every parameter."""

    @classmethod
    def zeros(cls, parameters: Tensor, rule: Rule = ADAM) -> "Adam":
        """The state before the first update."""
        count, zeros = parameters.new_zeros((), dtype=torch.float64), torch.zeros_like(parameters)
        return cls(zeros, zeros.clone(), count, _left(count, parameters.dtype, rule))


def adam_step(
    parameters: Tensor, gradient: Tensor, adam: Adam, lr: Tensor, eps: float, rule: Rule = ADAM
) -> tuple[Tensor, Adam]:
    """One update: new parameters and new state. `eps` is added to the corrected root, as in the paper.

    `lr` is one for all parameters, or of each its own.
    """
    mean = torch.lerp(adam.mean, gradient, 1 - rule.beta1)
    square = torch.lerp(adam.square, gradient * gradient, 1 - rule.beta2)
    first, second = adam.left.unbind()
    root = (square / second).sqrt_().add_(eps)
    count = adam.count + 1
    if rule.decay:
        parameters = parameters * (1 - lr * rule.decay)
    return parameters - (lr / first) * mean / root, Adam(mean, square, count, _left(count, parameters.dtype, rule))


def _left(count: Tensor, dtype: torch.dtype, rule: Rule) -> Tensor:
    if not rule.corrected:
        return torch.ones(2, dtype=dtype, device=count.device)
    # From the count in double precision: 1 - 0.999 has lost five digits in single.
    return torch.stack([1 - rule.beta1 ** (count + 1), 1 - rule.beta2 ** (count + 1)]).to(dtype)


def clip_norm(gradient: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """The gradient scaled down to the norm `most` where it is longer, and its norm before."""
    norm = torch.linalg.vector_norm(gradient)
    if most is None:
        return gradient, norm
    return gradient * (most / (norm + 1e-6)).clamp(max=1.0), norm


class Trained(NamedTuple):
    """Parameters and both moments of Adam, changed in place."""

    vector: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> "Trained":
        """The state before the first update."""
        return cls(vector, torch.zeros_like(vector), torch.zeros_like(vector))

    def step(self, gradient: Tensor, pace: Tensor, most: float | None = None, rule: Rule = ADAM) -> None:
        """One gradient step at this `pace`, the gradient's norm clipped to `most`."""
        if most is not None:
            gradient, _ = clip_norm(gradient, most)
        mean = torch.lerp(self.mean, gradient, 1 - rule.beta1)
        square = torch.lerp(self.square, gradient * gradient, 1 - rule.beta2)
        vector = self.vector * (1 - pace[2]) if rule.decay else self.vector
        self.vector.copy_(vector - pace[0] * mean / (square.sqrt() + pace[1]))
        self.mean.copy_(mean)
        self.square.copy_(square)

    def descend(self, loss: Callable, pace: Tensor, most: float | None, rule: Rule = ADAM) -> Any:
        """One gradient step on `loss(vector)[0]`; returns `loss(vector)[1]`."""
        slope, extra = gradient(loss, self.vector)
        self.step(slope, pace, most, rule)
        return extra


def pace(lr: float, eps: float, count: int, rule: Rule = ADAM) -> list[float]:
    """Step size and ε of the `count`-th update (from 1), with the corrections of the moments in them, and the decay.

    lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + ε) = [lr · √(1-β₂ᵗ)/(1-β₁ᵗ)] · m / (√v + [ε · √(1-β₂ᵗ)])
    """
    root, first = (math.sqrt(1 - rule.beta2**count), 1 - rule.beta1**count) if rule.corrected else (1.0, 1.0)
    return [lr * root / first, eps * root, lr * rule.decay]


class FunctionalNet:
    """A network as a function of its parameters in one vector: `net(vector)(obs)`."""

    def __init__(self, net: nn.Module):
        self.net = net
        self.names = [name for name, _ in net.named_parameters()]
        self.shapes = [p.shape for p in net.parameters()]
        self.sizes = [p.numel() for p in net.parameters()]

    def start(self) -> Tensor:
        """The parameters of the network as one new vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Parameters by their names as one vector."""
        return torch.cat([named[name].reshape(-1) for name in self.names])

    def __call__(self, vector: Tensor) -> Callable:
        """The network as a function of its arguments, differentiable in `vector`."""
        parts = zip(self.names, vector.split(self.sizes), self.shapes, strict=True)
        named = {name: part.view(shape) for name, part, shape in parts}
        return lambda *args: torch.func.functional_call(self.net, named, args)


class FlatNet(FunctionalNet):
    """A network whose parameters are views of one vector.

    Clipping and the optimizer then cost a handful of operations instead of a handful for each parameter, which on a
    small network is most of an update.
    """

    def __init__(self, net: nn.Module):
        super().__init__(net)
        self.parameters = list(net.parameters())
        self.vector = self.start()
        for p, part in zip(self.parameters, self.vector.split(self.sizes), strict=True):
            p.data = part.view(p.shape)

    def gradient(self, loss: Callable[[Callable], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """The gradient of `loss(net)[0]` as one vector, and `loss(net)[1]`.

        Eagerly autograd differentiates by the parameters themselves; inside a compiled graph the network is called as a
        function of the vector, because that is what `torch.compile` traces as one graph on every torch we support.
        """
        if torch.compiler.is_compiling():
            return gradient(lambda vector: loss(self(vector)), self.vector)
        with torch.enable_grad():
            value, extra = loss(self.net)
        gradients = torch.autograd.grad(value, self.parameters)
        return torch.cat([g.reshape(-1) for g in gradients]), extra


def gradient(loss: Callable[[Tensor], tuple[Tensor, Any]], vector: Tensor) -> tuple[Tensor, Any]:
    """The gradient of `loss(vector)[0]`, and `loss(vector)[1]`; eager or inside a compiled graph."""
    if torch.compiler.is_compiling():
        slope, (_, extra) = torch.func.grad_and_value(loss, has_aux=True)(vector)
        return slope, extra
    leaf = vector.detach().requires_grad_()
    with torch.enable_grad():
        value, extra = loss(leaf)
    return torch.autograd.grad(value, leaf)[0], extra


def copied(tensors: Sequence[Any]) -> list[Any]:
    """A copy of nested tuples of tensors, as plain lists on the CPU."""
    return [part.to("cpu", copy=True) if isinstance(part, Tensor) else copied(part) for part in tensors]


def restore(tensors: Sequence[Any], saved: Sequence[Any]) -> None:
    """Write what `copied` gave into the same tensors, so that views of them stay views."""
    for part, values in zip(tensors, saved, strict=True):
        if isinstance(part, Tensor):
            part.copy_(values)
        else:
            restore(part, values)


# Compiling takes about 20 s on two cores and saves about 1 ms an update of a small network (docs/log.md).
WORTH_UPDATES = 25_000
# Four updates of DQN in one graph take 13 s more to compile and save 80 µs each (docs/log.md).
WORTH_TOGETHER = 160_000


def should_compile(spec: ControlSpec) -> bool:
    """What `train.compile` means here: auto compiles long runs where there is a compiler."""
    wanted = spec.train.compile
    compiler = shutil.which("g++") or shutil.which("clang++")
    if wanted == "on" and compiler is None:
        raise UsageError(
            "train.compile: on needs a C++ compiler (g++ or clang++), found none: install one or set it to off"
        )
    return wanted == "on" or (wanted == "auto" and compiler is not None and spec.updates >= WORTH_UPDATES)


def together(spec: ControlSpec) -> int:
    """Updates per compiled graph: several in long runs, or with `compile: on`."""
    return 4 if spec.train.compile == "on" or spec.updates >= WORTH_TOGETHER else 1


def compiled(method: Any, wanted: bool = True) -> Callable:
    """`method` as one graph for fixed shapes, where that is wanted.

    On small networks what surrounds the kernels costs as much as they do: the C++ wrapper and checking only the tensors
    (the Python objects an update reads never change) save 40 % of a call (docs/log.md). The price of not checking: an
    argument that was None must stay None.
    """
    if not wanted:
        return method
    # torch keeps graphs by code object, and nothing it still checks tells two objects of one class apart: with a code
    # object of its own, one learner cannot be handed the graph, and so the coefficients, of another.
    f: Any = method.__func__
    own = FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    options: dict[str, Any] = {"cpp_wrapper": True, "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    return torch.compile(MethodType(own, method.__self__), fullgraph=True, dynamic=False, options=options)


@contextmanager
def products(precision: Literal["fp32", "bf16"]) -> Iterator[None]:
    """Matmul precision: float32, or factors rounded to bfloat16 with sums in float32.

    The latter is several times as fast on a CPU with AMX and changes nothing on hardware without such products.
    Parameters, gradients and the optimizer's state are float32 either way.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def no_denormals() -> Iterator[None]:
    """Flush numbers below 1e-38 to 0, on processors that can.

    The moments of Adam of a weight whose gradient has become 0, as behind a unit that is never active, shrink to such
    numbers and stay there, and arithmetic with them takes ten times as long (docs/log.md).
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def keep_freed_memory() -> None:
    """Let updates find the pages of the one before, which glibc gives back to the system at each free.

    Having freed a block of 31 MB, it keeps smaller ones; mapping and clearing them took 6 % of an update (docs/log.md).
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def scheduled(schedule: Schedule, progress: float) -> Tensor:
    """The value at `progress` in [0, 1] as a 0-dim tensor: a compiled update must not compile again when it moves."""
    return torch.tensor(value(progress=progress, **schedule.arguments()))
