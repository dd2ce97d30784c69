"""How fast training is: tokens a second, the share of the machine's peak, and a profile where asked for."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from palestra.lm.engine import TrainEngine
from palestra.spec.lm import ProfileSpec

PEAKS = {"H100": 989.5e12, "H200": 989.5e12, "A100": 312e12}
"""Dense bf16 operations a second by the maker's data sheet; a name that contains the key has its peak."""


def peak_flops(device: torch.device) -> float | None:
    """The peak of a GPU that is in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


class Speed:
    """Tokens a second between rows, without the time that evaluations, samples and checkpoints take."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine
        self._since, self._spent, self._tokens = time.perf_counter(), 0.0, -1
        self._peak = peak_flops(engine.device)

    def since_last(self, tokens: int) -> dict[str, float]:
        """Rates since the last call; none at the first one, which has waited for compilation and caches."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        spent = self._spent + time.perf_counter() - self._since
        done, first = tokens - self._tokens, self._tokens < 0
        self._since, self._spent, self._tokens = time.perf_counter(), 0.0, tokens
        if first:
            return {}
        rates = {"time/tokens_per_s": done / spent}
        if self._peak is not None:
            training = 3 * self.engine.flops_per_token
            rates["time/mfu"] = training * done / spent / (self._peak * self.engine.ranks.size)
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: its time does not count."""
        self._spent += time.perf_counter() - self._since
        yield
        self._since = time.perf_counter()


@contextmanager
def profiled(
    spec: ProfileSpec | None, path: Path, writes: bool
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Around a run: gives a context for each step, which records the steps that `spec` names into a Chrome trace."""
    if spec is None or not writes:
        yield lambda step: nullcontext()
        return
    first, last = spec.steps
    recorder, recording = torch.profiler.profile(record_shapes=True), False

    def end() -> None:
        nonlocal recording
        recording = False
        recorder.stop()
        recorder.export_chrome_trace(str(path))

    @contextmanager
    def around(step: int) -> Iterator[None]:
        nonlocal recording
        if step == first:
            recorder.start()
            recording = True
        yield
        if step == last and recording:
            end()

    try:
        yield around
    finally:
        if recording:  # the run ended before
            end()
