"""SLM-Lab's `net` block as our `net`, and what of it belongs to the algorithm here: rates, clipping, targets."""

from collections.abc import Iterator
from typing import Any

from palestra.migrate.blocks import Block, Notes
from palestra.migrate.schedules import in_fractions

KEYS = frozenset({
    "type", "shared", "hid_layers", "conv_hid_layers", "fc_hid_layers", "arc", "arc_file", "actor_arc", "critic_arc",
    "hid_layers_activation", "out_layer_activation", "init_fn", "normalize", "batch_norm", "layer_norm",
    "clip_grad_val", "loss_spec", "optim_spec", "lr_scheduler_spec", "update_type", "update_frequency", "polyak_coef",
    "gpu", "log_std_init", "actor_init_std", "critic_init_std", "use_same_optim", "cell_type", "rnn_hidden_size",
    "rnn_num_layers", "bidirectional", "seq_len", "actor_optim_spec", "critic_optim_spec", "actor_hid_layers",
    "critic_hid_layers", "actor_lr_scheduler_spec", "critic_lr_scheduler_spec",
})  # fmt: skip
ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu"}
NATURE = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
LOSSES = {"dqn": ("SmoothL1Loss", "HuberLoss"), "reinforce": ("MSELoss", "SmoothL1Loss")}  # which has no value to fit


def net_fields(block: Block, algorithm: str) -> dict[str, Any]:
    """The fields of our `net`."""
    kind = block.take("type", "MLPNet")
    found: dict[str, Any] = {}
    if "Conv" in kind:
        found["trunk"] = "nature"
        if "conv_hid_layers" in block and [layer[:3] for layer in block.data["conv_hid_layers"]] != NATURE:
            block.note("conv_hid_layers", "other convolutions than the Nature network's; that one was taken")
        found["hidden"] = _flat(block.take("fc_hid_layers", [512]))
    elif kind == "RecurrentNet":
        found |= _recurrent(block, algorithm)
    elif kind == "TorchArcNet":
        found |= _arc(block)
    else:
        if kind not in ("MLPNet", "DuelingMLPNet"):
            block.note("type", f"{kind} was taken as an MLP")
        found["hidden"] = _flat(block.take("hid_layers", [64, 64]))
    if "critic_hid_layers" in block:
        found["critic_hidden"] = _flat(block.take("critic_hid_layers"))
    if "actor_hid_layers" in block:
        found["hidden"] = _flat(block.take("actor_hid_layers"))
    block.read |= {"conv_hid_layers", "hid_layers", "fc_hid_layers"}
    if "hid_layers_activation" in block and kind != "TorchArcNet":
        found["activation"] = _activation(block, block.take("hid_layers_activation"))
    block.take("hid_layers_activation")  # a graph has its own
    for theirs, ours in (("shared", "shared"), ("layer_norm", "layer_norm"), ("log_std_init", "log_std")):
        if theirs in block:
            found[ours] = block.take(theirs)
    found["orthogonal"] = _orthogonal(block)
    block.wanted("normalize", True, "images are always divided by 255 here, and nothing else is")
    for key in ("actor_init_std", "critic_init_std"):
        if key in block and not block.data.get("shared"):
            block.note(key, "SLM-Lab ignores this key where the nets are separate; orthogonal weights have 0.01 and 1")
            block.read.add(key)
    block.read |= {"use_same_optim", "normalize"}
    return found


def optimiser_fields(block: Block, algorithm: str, frames: int) -> dict[str, Any]:
    """What our `algorithm` has of the net: learning rates, ε, clipping, β₁."""
    found: dict[str, Any] = {}
    optim = _optimiser(block, "actor_optim_spec" if "actor_optim_spec" in block else "optim_spec", algorithm)
    scheduler = "actor_lr_scheduler_spec" if "actor_lr_scheduler_spec" in block else "lr_scheduler_spec"
    if "lr" in optim:
        optim["lr"] = _rate(block, scheduler, optim["lr"], frames)
    found |= optim
    if "critic_optim_spec" in block:
        critic = _optimiser(block, "critic_optim_spec", algorithm)
        if algorithm in ("sac", "td3", "crossq"):
            found["critic_lr"] = _rate(block, "critic_lr_scheduler_spec", critic.get("lr", 3e-4), frames)
        elif critic.get("lr") != block.data.get("actor_optim_spec", {}).get("lr"):
            block.note("critic_optim_spec.lr", "policy and value have one learning rate here, the policy's")
    block.read |= {"optim_spec", "lr_scheduler_spec", "critic_lr_scheduler_spec", scheduler}
    if "clip_grad_val" in block.data:
        found["max_grad_norm"] = block.take("clip_grad_val")
    loss = block.take("loss_spec", {}).get("name", "MSELoss")
    if loss not in LOSSES.get(algorithm, ("MSELoss",)):
        block.note("loss_spec", f"the loss belongs to the algorithm here; {loss} was left out")
    return found


def target_fields(block: Block, updates_per_frame: float) -> dict[str, Any]:
    """How the target network follows: SLM-Lab counts frames, we count gradient steps."""
    kind, every = block.take("update_type", "polyak"), block.take("update_frequency", 1)
    tau = block.take("polyak_coef", 0.005)
    if kind == "replace":
        return {"target_every": max(1, round(every * updates_per_frame))}
    if tau > 0.5:
        block.note("polyak_coef", "in SLM-Lab's code this is the share of the learning net, and it was taken as that")
    return {"tau": tau}


def _recurrent(block: Block, algorithm: str) -> dict[str, Any]:
    cell, size = str(block.take("cell_type", "GRU")).lower(), block.take("rnn_hidden_size", 64)
    found: dict[str, Any] = {"hidden": _flat(block.take("fc_hid_layers", [])) or [64]}
    for key in ("rnn_num_layers", "bidirectional", "seq_len"):
        block.wanted(key, 1, "the state is carried through the whole rollout by one layer here")
    if algorithm not in ("ppo", "a2c"):
        block.note("type", f"{algorithm} has no recurrent form here; the recurrent layer was left out")
        return found
    if cell == "rnn":
        block.note("cell_type", "there is no plain RNN here; a GRU was taken")
    return {**found, "recurrent": {"cell": "lstm" if cell == "lstm" else "gru", "size": size}}


def _arc(block: Block) -> dict[str, Any]:
    """The widths and the activation of a TorchArc body that is a plain chain of layers."""
    arc = block.take("arc") or block.take("actor_arc")
    if "arc_file" in block or arc is None:
        block.take("arc_file")
        block.note("type", "the graph is in another file; the default MLP was taken")
        return {}
    layers = [(name, args) for module in arc.get("modules", {}).values() for name, args in _layers(module)]
    widths = [_width(args) for name, args in layers if "Linear" in name]
    if any("Conv" in name for name, _ in layers):
        block.note("arc", "a body with convolutions was taken as the Nature network")
        return {"trunk": "nature", "hidden": [width for width in widths if width] or [512]}
    known = {"LazyLinear", "Linear", "Flatten", "Tanh", "ReLU", "SiLU", "GELU", "LayerNorm", "LazyLayerNorm"}
    unknown = sorted({name for name, _ in layers} - known)
    if unknown:
        block.note("arc", f"layers without a counterpart were left out: {', '.join(unknown)}")
    found: dict[str, Any] = {"hidden": [width for width in widths if width] or [64, 64]}
    activations = [name.lower() for name, _ in layers if name.lower() in ACTIVATIONS]
    if activations:
        found["activation"] = ACTIVATIONS[activations[0]]
    if any("LayerNorm" in name for name, _ in layers):
        found["layer_norm"] = True
    critic = block.take("critic_arc")
    if critic is not None:
        own = Block({"arc": critic}, f"{block.path}.critic_arc", Notes())
        found["critic_hidden"] = _arc(own).get("hidden", found["hidden"])
    return found


def _layers(module: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(module, str):
        yield module, {}
    elif isinstance(module, list):
        for one in module:
            yield from _layers(one)
    elif isinstance(module, dict):
        for name, args in module.items():
            if name == "Sequential":
                yield from _layers(args)
            else:
                yield name, args


def _width(args: Any) -> int | None:
    if isinstance(args, dict):
        return args.get("out_features")
    if isinstance(args, list) and args:
        return args[-1]
    return args if isinstance(args, int) else None


def _optimiser(block: Block, key: str, algorithm: str) -> dict[str, Any]:
    inner = block.block(key)
    name, found = inner.take("name", "Adam"), {}
    if name.removeprefix("Global") != "Adam":
        inner.note("name", f"Adam is the optimiser here; {name} was left out")
    for theirs, ours in (("lr", "lr"), ("eps", "adam_eps")):
        if theirs in inner:
            found[ours] = inner.take(theirs)
    betas = inner.take("betas")
    if betas is not None and algorithm == "crossq":
        found["beta1"] = betas[0]
    elif betas is not None and list(betas) != [0.9, 0.999]:
        inner.note("betas", "Adam has β of 0.9 and 0.999 here")
    inner.close()
    return found


def _rate(block: Block, key: str, lr: float, frames: int) -> Any:
    inner = block.block(key)
    name, last = inner.take("name"), inner.take("frame", frames)
    if name is None:
        return lr
    if name != "LinearToZero":
        inner.note("name", f"the scheduler {name} has no counterpart here; the learning rate is constant")
        return lr
    return in_fractions("linear", lr, 0.0, 0, last, frames)


def _orthogonal(block: Block) -> bool:
    name = block.take("init_fn")
    if name not in (None, "orthogonal_"):
        block.note("init_fn", f"{name} has no counterpart here; torch's own initial weights were taken")
    return name == "orthogonal_"


def _activation(block: Block, name: str) -> str:
    if name not in ACTIVATIONS:
        block.note("hid_layers_activation", f"{name} has no counterpart here; relu was taken")
    return ACTIVATIONS.get(name, "relu")


def _flat(layers: Any) -> list[int]:
    """Widths, also where multi-headed nets nest them."""
    return [width for item in layers for width in (_flat(item) if isinstance(item, list) else [item])]
