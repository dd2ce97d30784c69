"""Devices: published peaks, what of them is reached, and calibrations that `palestra plan --calibrate` has stored."""

import json
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from palestra.data.cache import cache_root
from palestra.errors import UsageError, did_you_mean
from palestra.runs.store import write_json
from palestra.spec.source import read_file

GB, TERA = 1e9, 1e12
CPU = "cpu"
PHASES = ("train", "update", "prefill", "decode", "publish", "complete", "apart", "joined")
"""Gradients, the optimizer, prompts, a decode step, weights to a generator; and what Python costs besides: of a
completion, a decode step (`launches`) and a step; more of a completion with a generator apart, or several trainers."""


class Work(NamedTuple):
    """What a phase does on one device; a price for each field makes seconds of it."""

    flops: float = 0.0  # floating-point operations
    bytes: float = 0.0  # bytes read and written in the device's memory
    launches: float = 0.0  # layers started
    rows: float = 0.0  # sequences handled
    steps: float = 0.0  # times that it happens

    @property
    def host(self) -> float:
        """What the processor does that starts the others."""
        return self.launches + self.rows + self.steps

    def times(self, factor: float) -> "Work":
        return Work(*(factor * count for count in self))

    def plus(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Device:
    """A type of device, and what each kind of work costs on it."""

    name: str
    memory: float  # bytes
    link: float  # bytes a second to another device of the machine, one way
    network: float  # bytes a second to a device of another machine, one way
    prices: dict[str, Work]  # seconds per unit of work, by phase; times add up, because kernels of each kind take turns
    hop: float = 8e-6  # seconds that a collective waits for each doubling of its processes
    crowd: float = 0.0  # what more a process takes to compute while others of the machine do
    base: float = 0.7 * GB  # bytes that a process takes before it has a model
    sampling: float = 0.0  # bytes more of a process that has completions sampled
    joined: float = 0.0  # bytes more of a process that trains with others
    source: str = "published peaks"  # where the prices come from

    @property
    def cpu(self) -> bool:
        """Whether specs run on it as on `cpu`: FP32 where auto, other attention."""
        return self.name == CPU

    def parts(self, phase: str, work: Work) -> Work:
        """Seconds of a phase, by what they go to."""
        parts = Work(*(price * count for price, count in zip(self.prices[phase], work, strict=True)))
        if self.cpu or phase != "train":
            return parts
        # Python starts a GPU's kernels ahead of it, so only what it takes longer than they do counts.
        waits = max(0.0, 1 - (parts.flops + parts.bytes) / max(1e-12, parts.host))
        return Work(parts.flops, parts.bytes, *(waits * seconds for seconds in parts[2:]))

    def seconds(self, phase: str, work: Work) -> float:
        """Seconds of a phase."""
        return sum(self.parts(phase, work))


def _from_peaks(name: str, memory: float, flops: float, bandwidth: float, link: float, network: float) -> Device:
    """Published peaks (dense bf16, no sparsity) by the fractions that were reached on one H200.

    Those of decoding are a fit to five rows of docs/log.md (135M at 1, 64 and 512 sequences, 0.5B at 512, 0.6B at 256,
    right to 18 %); training and prompts by 364k tokens/s of 135M; `complete` by the 0.1 s that 256 completions of a
    step take beside decoding; `publish` by 17 ms for 135M.
    """
    flop, byte = 1 / (flops * TERA), 1 / (bandwidth * TERA)
    prices = {
        "train": Work(flop / 0.42, byte / 0.9, 60e-6, 0.0, 2e-3),
        "update": Work(flop / 0.42, byte / 0.8, 30e-6, 0.0, 1e-3),
        "prefill": Work(flop / 0.42, byte / 0.9, 30e-6, 0.0, 1e-3),
        "decode": Work(flop / 0.376, byte / 0.889, 14.8e-6, 1.6e-6, 0.0),
        "complete": Work(0.0, 0.0, 0.0, 0.4e-3, 2e-3),
        **{"apart": Work(), "joined": Work()},
        "publish": Work(0.0, byte / 0.4, 0.5e-3, 0.0, 2e-3),
    }
    return Device(name, memory * GB, link * GB, network * GB, prices)


PUBLISHED = {
    device.name: device
    for device in (
        # memory GB, dense bf16 TFLOP/s, memory TB/s, NVLink or PCIe GB/s one way, network GB/s a device
        _from_peaks("B200", 180, 2250, 7.7, 900, 50),
        _from_peaks("H200", 141, 989, 4.8, 450, 50),
        _from_peaks("H100", 80, 989, 3.35, 450, 50),
        _from_peaks("H800", 80, 989, 3.35, 200, 50),
        _from_peaks("H20", 96, 148, 4.0, 450, 50),
        _from_peaks("A100", 80, 312, 2.04, 300, 25),
        _from_peaks("A100-40GB", 40, 312, 1.56, 300, 25),
        _from_peaks("L40S", 48, 362, 0.864, 32, 12.5),
        _from_peaks("A10G", 24, 70, 0.6, 32, 6),
        _from_peaks("L4", 24, 121, 0.3, 32, 6),
        _from_peaks("RTX4090", 24, 165, 1.01, 32, 3),
    )
}


@dataclass(frozen=True)
class Pool:
    """The devices of a plan."""

    device: Device
    each: int  # devices of a machine
    nodes: int

    @property
    def count(self) -> int:
        return self.each * self.nodes

    def bandwidth(self, processes: int) -> float:
        """Bytes a second between neighbors of a group of so many processes, placed side by side."""
        return self.device.link if processes <= self.each else self.device.network


def parse_pool(text: str, nodes: int = 1) -> Pool:
    """`8xH200`, `H100` or `cpu`, on each of so many machines."""
    match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?([A-Za-z][\w-]*)", text.strip())
    if match is None or match[1] == "0":
        raise UsageError(f"--devices {text}: expected a number and a device, such as 8xH200 or 2xcpu")
    return Pool(find_device(match[2]), int(match[1] or 1), nodes)


def find_device(name: str) -> Device:
    """A device by its name: as calibrated here, else by its published peaks."""
    stored = {file.stem for file in (cache_root() / "devices").glob("*.json")} - {calibration_file(CPU).stem}
    known = {each.upper(): each for each in (*PUBLISHED, *stored, CPU)}
    if name.upper() not in known:
        hint = did_you_mean(name.upper(), known)
        words = " ".join(filter(None, (hint, f"Known are {', '.join(known.values())}; others by --calibrate")))
        raise UsageError(f"--devices: there are no figures of {name}. {words}")
    name = known[name.upper()]
    if (file := calibration_file(name)).is_file():
        return read_calibration(file)
    if name == CPU:
        raise UsageError("--devices cpu: CPUs have no published figures that hold: palestra plan --calibrate first")
    return PUBLISHED[name]


def calibration_file(name: str) -> Path:
    """Where the calibration of a device is; that of a CPU by its machine's type."""
    return cache_root() / "devices" / f"{f'{CPU}-{platform.machine()}' if name == CPU else name}.json"


def read_calibration(file: Path) -> Device:
    """A stored calibration."""
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        return Device(**data | {"prices": {phase: Work(*data["prices"][phase]) for phase in PHASES}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        words = f"({error}): remove it, and run palestra plan --calibrate"
        raise UsageError(f"{file} is not a calibration {words}") from error


def store_calibration(device: Device) -> Path:
    """Write a calibration, whole or not at all."""
    file = calibration_file(device.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(device))
    return file


def read_price(file: Path, name: str) -> float:
    """Dollars an hour of a device, from a YAML or JSON file `{H200: 3.5}`."""
    data = read_file(file).data
    if not isinstance(data, dict) or not all(isinstance(price, int | float) for price in data.values()):
        raise UsageError(f"{file}: expected dollars an hour by device, such as {{H200: 3.5}}")
    if name not in data:
        raise UsageError(f"{file}: there is no price of {name}, only of {', '.join(data) or 'nothing'}: add it")
    return float(data[name])
