"""Independent streams of random numbers from one seed, by name."""

import random
import zlib

import numpy as np
import torch


def stream(seed: int, *names: str | int) -> int:
    """A 31-bit seed for the stream `names` of `seed`: neighboring seeds and other names give unrelated streams.

    Seeds are never used as they are: environment 1 of seed 0 would else replay environment 0 of seed 1.
    """
    key = [zlib.crc32(name.encode()) if isinstance(name, str) else name for name in names]
    return int(np.random.SeedSequence([seed, *key]).generate_state(1, np.uint32)[0] >> 1)


def seed_everything(seed: int) -> None:
    """Seed the global generators; what Palestra draws itself comes from generators of its own."""
    random.seed(stream(seed, "python"))
    np.random.seed(stream(seed, "numpy"))  # noqa: NPY002  environments and hooks may use the global one
    torch.manual_seed(stream(seed, "torch"))


def random_state() -> dict:
    """The state of every global generator."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def load_random_state(state: dict) -> None:
    """Continue from `random_state()`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
