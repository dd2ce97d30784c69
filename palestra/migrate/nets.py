"""SLM-Lab's `net` and `search` blocks as ours."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from palestra.migrate.blocks import ForeignBlock, Notes, in_fractions

KEYS = frozenset({
    "type", "shared", "hid_layers", "conv_hid_layers", "fc_hid_layers", "arc", "arc_file", "actor_arc", "critic_arc",
    "hid_layers_activation", "out_layer_activation", "init_fn", "normalize", "batch_norm", "layer_norm",
    "clip_grad_val", "loss_spec", "optim_spec", "lr_scheduler_spec", "update_type", "update_frequency", "polyak_coef",
    "gpu", "log_std_init", "actor_init_std", "critic_init_std", "use_same_optim", "cell_type", "rnn_hidden_size",
    "rnn_num_layers", "bidirectional", "seq_len", "actor_optim_spec", "critic_optim_spec", "actor_hid_layers",
    "critic_hid_layers", "actor_lr_scheduler_spec", "critic_lr_scheduler_spec",
})  # fmt: skip
ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu"}
LAYERS = {"Linear", "Flatten", "Tanh", "ReLU", "SiLU", "GELU", "LayerNorm", "Conv2d"}
NATURE = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
LOSSES = {"dqn": ("SmoothL1Loss", "HuberLoss"), "reinforce": ("MSELoss", "SmoothL1Loss")}  # which has no value to fit


def net_fields(block: ForeignBlock, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The fields of our `net`, for the fields of our `algorithm`."""
    kind, name = block.take("type", "MLPNet"), algorithm["name"]
    fields: dict[str, Any] = {}
    if "Conv" in kind:
        fields["trunk"] = "nature"
        if "conv_hid_layers" in block and [layer[:3] for layer in block.data["conv_hid_layers"]] != NATURE:
            block.note("conv_hid_layers", "other convolutions than the Nature network's; that one was taken")
        fields["hidden"] = flat(block.take("fc_hid_layers", [512]))
    elif kind == "RecurrentNet":
        fields |= _recurrent(block, name, "self_imitation" not in algorithm)
    elif kind == "TorchArcNet":
        fields |= _arc(block, block.take("arc") or block.take("actor_arc"), name)
    else:
        if kind not in ("MLPNet", "DuelingMLPNet"):
            block.note("type", f"{kind} was taken as an MLP")
        fields["hidden"] = flat(block.take("hid_layers", [64, 64]))
    own = block.renamed(critic_hid_layers="critic_hidden", actor_hid_layers="hidden")
    fields |= {name: flat(widths) for name, widths in own.items()}
    block.read |= {"conv_hid_layers", "hid_layers", "fc_hid_layers"}
    activation = block.take("hid_layers_activation", "relu")
    if kind != "TorchArcNet":  # a graph has its own
        if activation not in ACTIVATIONS:
            block.note("hid_layers_activation", f"{activation} has no counterpart here; relu was taken")
        fields["activation"] = ACTIVATIONS.get(activation, "relu")
    if name in ("sac", "crossq"):
        block.wanted("shared", False, "SLM-Lab ignores it: policy and critics have networks of their own")
        block.data.pop("shared", None)
    if block.data.get("shared") and "critic_hidden" in fields:
        block.note("critic_hid_layers", "the critic has no layers of its own in a shared net; they were left out")
        del fields["critic_hidden"]
    fields |= block.renamed(shared="shared", layer_norm="layer_norm", log_std_init="log_std")
    init = block.take("init_fn")
    fields["orthogonal"] = init == "orthogonal_"
    if init not in (None, "orthogonal_"):
        block.note("init_fn", f"{init} has no counterpart here; torch's own initial weights were taken")
    if fields.get("trunk") == "nature" and not block.take("normalize", False):
        block.note("normalize", "images are always divided by 255 here")
    for key in ("actor_init_std", "critic_init_std"):
        if key in block and not block.data.get("shared"):
            block.note(key, "SLM-Lab ignores this key where the nets are separate; orthogonal weights have 0.01 and 1")
            block.read.add(key)
    block.read |= {"use_same_optim", "normalize"}
    return fields


def optimizer_fields(block: ForeignBlock, algorithm: str, frames: int) -> dict[str, Any]:
    """The fields of our `algorithm` that SLM-Lab has in the net: learning rates, ε, clipping, β₁."""
    fields = _optimizer(block, "actor_optim_spec" if "actor_optim_spec" in block else "optim_spec", algorithm)
    scheduler = "actor_lr_scheduler_spec" if "actor_lr_scheduler_spec" in block else "lr_scheduler_spec"
    fields["lr"] = _rate(block, scheduler, fields["lr"], frames)
    if "critic_optim_spec" in block:
        critic = _optimizer(block, "critic_optim_spec", algorithm)
        if algorithm in ("sac", "td3", "crossq"):
            fields["critic_lr"] = _rate(block, "critic_lr_scheduler_spec", critic["lr"], frames)
        elif critic["lr"] != block.data.get("actor_optim_spec", {}).get("lr"):
            block.note("critic_optim_spec.lr", "policy and value have one learning rate here, the policy's")
    block.read |= {"optim_spec", "lr_scheduler_spec", "critic_lr_scheduler_spec", scheduler}
    fields["max_grad_norm"] = block.take("clip_grad_val")
    loss = block.take("loss_spec", {}).get("name", "MSELoss")
    if loss not in LOSSES.get(algorithm, ("MSELoss",)):
        block.note("loss_spec", f"the loss belongs to the algorithm here; {loss} was left out")
    return fields


def dqn_target_fields(block: ForeignBlock, num_envs: int, updates: float, frames: int) -> dict[str, Any]:
    """How DQN's target follows: SLM-Lab moves it after each vector step, we after each of `updates` gradient steps."""
    kind, every = block.take("update_type", "replace"), block.count("update_frequency", 1)
    share = block.take("polyak_coef", 0)
    if kind == "replace":
        return {"target_every": max(1, round(max(every, num_envs) / num_envs * updates))}
    if share == 0:
        block.note("polyak_coef", "0 leaves the target network as it began, in SLM-Lab and here")
        return {"target_every": round(updates * frames) + 1}
    tau = polyak(share, updates)
    if share > 0.5 or tau != share:
        here = f"tau is {tau:.4g}, at each of {updates:g} gradient steps in it"
        block.note("polyak_coef", f"SLM-Lab's target takes {share} of the learning net once a vector step; here {here}")
    return {"tau": tau}


def sac_target_fields(block: ForeignBlock, num_envs: int) -> dict[str, Any]:
    """How SAC's targets follow, after each gradient step there and here."""
    kind, every = block.take("update_type", "replace"), block.count("update_frequency", 1)
    if kind == "polyak":
        return {"tau": block.take("polyak_coef", 0)}
    if every > num_envs:
        block.note("update_type", f"the targets of SAC are not replaced every {every} frames here; tau 0.005 was taken")
        return {}
    return {"tau": 1.0}


def polyak(share: float, updates: float) -> float:
    """The tau that moves a target in `updates` steps as far as `share` does in one."""
    return share if updates == 1 else 1 - (1 - share) ** (1 / updates)


def _recurrent(block: ForeignBlock, algorithm: str, possible: bool) -> dict[str, Any]:
    cell, size = str(block.take("cell_type", "GRU")).lower(), block.count("rnn_hidden_size", 64)
    hidden = flat(block.take("fc_hid_layers", []))
    for key in ("rnn_num_layers", "bidirectional", "seq_len"):
        block.wanted(key, 1, "the state is carried through the whole rollout by one layer here")
    if algorithm not in ("ppo", "a2c") or not possible:
        what = f"{algorithm} has no recurrent form here" if possible else "self-imitation has no recurrent form here"
        block.note("type", f"{what}; a hidden layer was taken in place of the recurrent one")
        return {"hidden": [*hidden, size]}
    if cell == "rnn":
        block.note("cell_type", "there is no plain RNN here; a GRU was taken")
    return {"hidden": hidden, "recurrent": {"cell": "lstm" if cell == "lstm" else "gru", "size": size}}


def _arc(block: ForeignBlock, arc: Any, algorithm: str) -> dict[str, Any]:
    """The widths and the activation of a TorchArc body that is a plain chain of layers."""
    if "arc_file" in block or not isinstance(arc, dict):
        block.take("arc_file")
        block.note("type", "the graph is in another file; the default MLP was taken")
        return {}
    layers = [(name, args) for module in arc.get("modules", {}).values() for name, args in _layers(module)]
    widths = [width for name, args in layers if "Linear" in name and (width := _width(args))]
    convolutions = [args or {} for name, args in layers if "Conv" in name]
    fields: dict[str, Any] = {"hidden": widths}
    if convolutions:
        fields["trunk"] = "nature"
        if [[args.get(key) for key in ("out_channels", "kernel_size", "stride")] for args in convolutions] != NATURE:
            block.note("arc", "other convolutions than the Nature network's; that one was taken")
    known = {*LAYERS, "BatchRenorm1d"} if algorithm == "crossq" else LAYERS
    unknown = sorted({name.removeprefix("Lazy") for name, _ in layers} - known)
    if unknown:
        block.note("arc", f"layers without a counterpart were left out: {', '.join(unknown)}")
    activations = [name.lower() for name, _ in layers if name.lower() in ACTIVATIONS]
    if activations:
        fields["activation"] = ACTIVATIONS[activations[0]]
    if len(set(activations)) > 1:
        block.note("arc", f"one activation is for all layers here: {activations[0]}")
    if any("LayerNorm" in name for name, _ in layers):
        fields["layer_norm"] = True
    critic = block.take("critic_arc")
    if critic is not None:
        fields["critic_hidden"] = _arc(block, critic, algorithm).get("hidden", widths)
    return fields


def renorm_fields(block: ForeignBlock) -> dict[str, Any]:
    """CrossQ's batch renormalization from the layers of a critic's graph."""
    modules = (block.data.get("arc") or {}).get("modules", {}).values()
    args = next((args for module in modules for name, args in _layers(module) if "BatchRenorm" in name), None) or {}
    ours = {"momentum": "renorm_momentum", "warmup_steps": "renorm_warmup"}
    return {ours[key]: value for key, value in args.items() if key in ours}


def _layers(module: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(module, str):
        yield module, {}
    elif isinstance(module, list):
        for layer in module:
            yield from _layers(layer)
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


def _optimizer(block: ForeignBlock, key: str, algorithm: str) -> dict[str, Any]:
    inner = block.block(key)
    name = inner.take("name", "Adam")
    if name.removeprefix("Global") != "Adam":
        inner.note("name", f"Adam is the optimizer here; {name} was left out")
    fields = {"lr": inner.take("lr", 1e-3)}  # torch's default, as are the others that a spec leaves out
    if algorithm != "sarsa":
        fields["adam_eps"] = inner.take("eps", 1e-8)
    betas = inner.take("betas", [0.9, 0.999])
    if algorithm == "crossq":
        fields["beta1"] = betas[0]
    elif list(betas) != [0.9, 0.999]:
        inner.note("betas", "Adam has β of 0.9 and 0.999 here")
    inner.close()
    return fields


def _rate(block: ForeignBlock, key: str, lr: float, frames: int) -> Any:
    inner = block.block(key)
    name, last = inner.take("name"), inner.take("frame", frames)
    if name is None:
        return lr
    if name != "LinearToZero":
        inner.note("name", f"the scheduler {name} has no counterpart here; the learning rate is constant")
        return lr
    return in_fractions("linear", lr, 0.0, 0, last, frames)


def flat(layers: Any) -> list[int]:
    """Widths, also where multi-headed nets nest them."""
    return [width for item in layers for width in (flat(item) if isinstance(item, list) else [item])]


SAME = ("gamma", "lam", "policy_delay", "target_entropy", "alpha_lr")  # fields of both algorithms
ALGORITHM = {
    **dict(zip(SAME, SAME, strict=True)),
    "val_loss_coef": "value_coef",
    "time_horizon": "horizon",
    "num_step_returns": "horizon",
    "minibatch_size": "minibatch",
    "training_epoch": "epochs",
    "training_start_step": "start",
    "fixed_alpha": "alpha",
    "sil_policy_loss_coef": "self_imitation.coef",
    "sil_val_loss_coef": "self_imitation.value_coef",
}
SCHEDULES = {"entropy_coef_spec": "entropy", "clip_eps_spec": "clip"}
PARTS = {"start_val": "start", "end_val": "end", "start_step": "begin", "end_step": "finish"}
NET = {
    "optim_spec.lr": "algorithm.lr",
    "actor_optim_spec.lr": "algorithm.lr",
    "critic_optim_spec.lr": "algorithm.critic_lr",
    "clip_grad_val": "algorithm.max_grad_norm",
    "polyak_coef": "algorithm.tau",
    "update_frequency": "algorithm.target_every",
    "hid_layers": "net.hidden",
    "fc_hid_layers": "net.hidden",
    "rnn_hidden_size": "net.recurrent.size",
    "hid_layers_activation": "net.activation",
    "layer_norm": "net.layer_norm",
    "shared": "net.shared",
}
PATHS = {
    **{f"agent.algorithm.{theirs}": f"algorithm.{ours}" for theirs, ours in ALGORITHM.items()},
    **{f"agent.net.{theirs}": ours for theirs, ours in NET.items()},
    "agent.memory.batch_size": "algorithm.batch",
    "agent.memory.max_size": "algorithm.buffer",
    "agent.memory.alpha": "algorithm.prioritized.alpha",
    "env.num_envs": "env.num_envs",
    "env.max_frame": "train.frames",
}
FORMS = {
    "uniform": "uniform", "quniform": "uniform", "loguniform": "loguniform", "qloguniform": "loguniform",
    "randint": "int", "qrandint": "int", "lograndint": "int", "qlograndint": "int", "choice": "choice",
    "grid_search": "choice",
}  # fmt: skip
APPROXIMATE = ("grid_search", "quniform", "qloguniform", "qrandint", "lograndint", "qlograndint")


def search_fields(
    space: Mapping[str, Any], meta: ForeignBlock, spec: Mapping[str, Any], net: str, notes: Notes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our `search` for a spec imported with a `net` of this type, and fields of `every` that it needs; or nothing."""
    axes = {path: axis for key, values in _flat(space) for path, axis in _axis(key, values, spec, net, notes)}
    scheduler = meta.block("search_scheduler", frozenset({"grace_period", "reduction_factor"}))
    trials = meta.count("max_trial", 16)
    if not axes:
        scheduler.rest()
        return {}, {}
    fields: dict[str, Any] = {"space": axes, "trials": max(1, trials)}
    every: dict[str, Any] = {}
    if scheduler.data:
        grace = max(1, int(scheduler.take("grace_period", 1)))
        if grace < spec["train"]["frames"]:
            reduction = max(2, round(scheduler.take("reduction_factor", 4)))
            fields["pruner"] = {"asha": {"grace": grace, "reduction": reduction, "by": "frames"}}
            every["eval"] = f"{grace} frames"  # trials are compared at evaluations
        scheduler.close()
    return fields, every


def _flat(space: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, also of nested mappings and lists of one, which older specs have."""
    for key, value in space.items():
        inner = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(inner, Mapping) and "__" not in key:
            yield from _flat(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _axis(key: str, values: Any, spec: Mapping[str, Any], net: str, notes: Notes) -> list[tuple[str, dict[str, Any]]]:
    path, _, form = key.rpartition("__")
    at, ours, place = f"search.{key}", FORMS.get(form), _where(path, spec, net)
    if ours is None or place is None or not isinstance(values, list):
        what = f"the distribution {form or '(none)'}" if ours is None else "the field"
        notes.add(at, f"{what} has no counterpart here; it is not searched")
        return []
    if form in APPROXIMATE:
        notes.add(at, f"{form} has no counterpart here; {ours} was taken")
    if ours == "int":
        values = [int(value) - index for index, value in enumerate(values[:2])]  # SLM-Lab leaves the upper end out
    elif ours != "choice":
        values = values[:2]
    where, convert = place
    left, lost = [], []
    for value in values:
        new = None if value is None else convert(value)
        if new is None and value is not None:
            lost.append(str(value))
        elif new not in left:
            left.append(new)
    if lost:
        notes.add(at, f"not possible here, and left out: {', '.join(lost)}")
    if len(left) < 2:
        notes.add(at, "fewer than two values are left; it is not searched")
        return []
    return [(where, {ours: left})]


def _where(path: str, spec: Mapping[str, Any], net: str) -> tuple[str, Callable[[Any], Any]] | None:
    """Our path of a field and how its values become ours; None where the imported spec cannot have it."""
    algorithm, frames, n = spec["algorithm"], spec["train"]["frames"], spec["env"]["num_envs"]
    outer, _, last = path.rpartition(".")
    scheduled = outer.removeprefix("agent.algorithm.")
    if scheduled in (*SCHEDULES, "explore_var_spec"):
        field = SCHEDULES.get(scheduled, "temperature" if "temperature" in algorithm else "epsilon")
        if not isinstance(algorithm.get(field), dict):
            return (f"algorithm.{field}", _same) if last == "start_val" and field in algorithm else None
        inside = (lambda step: step / frames if step <= frames else None) if last.endswith("_step") else _same
        return (f"algorithm.{field}.{PARTS[last]}", inside) if last in PARTS else None
    ours = PATHS.get(path)
    name = (ours or "").rpartition(".")[2]
    if ours is None or (name in ("tau", "target_every") and name not in algorithm):
        return None
    if name == "hidden":
        read = "fc_hid_layers" if "Conv" in net or net == "RecurrentNet" else "hid_layers"
        return (ours, flat) if last == read else None
    if name == "activation":
        return ours, ACTIVATIONS.get
    if name == "target_every":
        return ours, lambda every: max(1, round(max(every, n) * algorithm["replay_ratio"]))
    if name == "tau" and algorithm["name"] == "dqn":
        return ours, lambda share: polyak(share, algorithm["replay_ratio"] * n) if 0 < share <= 1 else None
    here: Any = spec
    for part in ours.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return (f"{ours}.start" if isinstance(here, dict) and "shape" in here else ours), _same


def _same(value: Any) -> Any:
    return value
