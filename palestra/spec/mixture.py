"""What language models are trained on: sources of texts, their weights, and composites of groups of them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from palestra.spec.model import Conflict, Model

Share = Annotated[float, Field(ge=0)]

# The weights of parts are terabytes of text.
COMPOSITES: dict[str, dict[str, tuple[float, dict[str, float]]]] = {
    # Two large crawls of the web with a small share of educational pages: Nemotron-CC (Su et al. 2024, arXiv
    # 2412.02595), DCLM (Li et al. 2024, arXiv 2406.11794) and FineWeb-Edu (Penedo et al. 2024, arXiv 2406.17557).
    "nemotron_dclm_fineweb_10b": {
        "nemotron_cc": (
            0.4,
            {
                "nemotron_hq_actual": 0.91351,
                "nemotron_hq_synth": 2.72,
                "nemotron_medium_high": 0.82471,
                "nemotron_medium": 3.38,
                "nemotron_medium_low": 1.54,
                "nemotron_low_actual": 0.70123,
                "nemotron_low_synth": 0.62771,
            },
        ),
        "dclm": (0.5, {"dclm_baseline": 3.8, "starcoder": 0.25, "proofpile_2": 0.055}),
        "fineweb_edu": (0.1, {"fineweb_edu_10b": 1.0}),
    }
}
"""By name: groups, each with its share of all examples and the relative weights of its parts."""


class GroupSpec(Model):
    """Sources that have a share together."""

    share: Share | None = None
    """Share of all examples, relative to the other groups; null keeps that of `base`."""
    parts: dict[str, Share] = Field(default={})
    """Weight of each part within the group; parts of `base` that are not named stay."""


class CompositeSpec(Model):
    """A mixture of groups of sources: a built-in one, changed or not, or your own."""

    base: str | None = None
    """Composite to start from: `nemotron_dclm_fineweb_10b`; null: empty."""
    groups: dict[str, GroupSpec] = Field(default={})
    """Groups added to those of `base` or changing them; share 0 removes one."""

    def weights(self) -> dict[str, float]:
        """Weight of each part, summing to 1."""
        groups = self._groups()
        total = sum(share or 0.0 for share, _ in groups.values())
        weights: dict[str, float] = {}
        for share, parts in groups.values():
            inside = sum(parts.values())
            for name, weight in parts.items():
                weights[name] = (share or 0.0) / total * weight / inside if weight else 0.0
        return weights

    def conflicts(self) -> Iterator[Conflict]:
        """Unknown base, groups without share or parts, parts in two groups."""
        if self.base is not None and self.base not in COMPOSITES:
            yield Conflict(("base",), f"expected one of {', '.join(COMPOSITES)}, or null")
            return
        groups = self._groups()
        owners: dict[str, str] = {}
        for name, (share, parts) in groups.items():
            if share is None:
                yield Conflict(("groups", name, "share"), "expected a number, because `base` has no such group")
            if share != 0 and not any(parts.values()):
                yield Conflict(("groups", name, "parts"), "expected at least one weight above 0")
            for part in parts:
                if owners.setdefault(part, name) != name:
                    reason = f"expected a name that the group {owners[part]!r} does not have"
                    yield Conflict(("groups", name, "parts", part), reason)
        if not any(share is None or share for share, _ in groups.values()):
            yield Conflict(("groups",), "expected at least one share above 0")

    def _groups(self) -> dict[str, tuple[float | None, dict[str, float]]]:
        base = COMPOSITES[self.base] if self.base is not None else {}
        groups: dict[str, tuple[float | None, dict[str, float]]] = {**base}
        for name, change in self.groups.items():
            share, parts = groups.get(name, (None, {}))
            groups[name] = (share if change.share is None else change.share, {**parts, **change.parts})
        return groups


class Source(Model):
    """Texts, conversations or pairs."""

    path: str = Field(min_length=1)
    """A file, a folder, a pattern such as data/*.jsonl, s3://… or a Hub dataset: text, JSONL, JSON, Parquet, Arrow."""


class TrainSource(Source):
    """A source with a weight in the training mixture."""

    weight: float = Field(default=1.0, ge=0)
    """Relative weight in the training mixture, times that of a composite; 0: evaluation only."""


class TextSource(Source):
    """Plain texts."""

    key: str = Field(default="text", min_length=1)
    """Column with the text."""
    split: str | None = Field(default=None, min_length=1)
    """Separator of the documents in a text file, such as a line break; null: one document per file."""


class MixSpec(Model):
    """Blocks, order and end of a mixture."""

    block: int = Field(default=2048, ge=1, lt=2**16)
    """Examples per block; every block has the exact mixture weights."""
    shuffle: bool = True
    """Shuffle each source's examples anew each epoch."""
    stop: Literal["restart", "first_exhausted", "all_exhausted"] = "restart"
    """When a source is exhausted: restart it, or end the data with the first or the last exhausted source."""


class LmData(Model):
    """Shared fields of training data."""

    train: Mapping[str, TrainSource]
    """Training sources by name; weight 0: evaluation only."""
    eval: Mapping[str, Source]
    """Evaluation sources by name."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each training source held out for evaluation: random documents, the same in all runs."""
    context: int = Field(ge=2)
    """Tokens per example: exactly for plain text, at most for conversations."""
    mix: MixSpec = MixSpec()
    """Mixing of the sources."""
    composite: CompositeSpec | None = None
    """Named mixture that sets the weights of `train`; null: the sources' own."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each training source."""
        given = {} if self.composite is None else self.composite.weights()
        return {name: source.weight * given.get(name, self.composite is None) for name, source in self.train.items()}

    @property
    def trained(self) -> list[str]:
        """Names of the sources with a weight above 0."""
        return [name for name, weight in self.weights.items() if weight > 0]

    @property
    def sources(self) -> list[tuple[Literal["train", "eval"], str, Source]]:
        """All sources: (split, name, source)."""
        return [("train", *named) for named in self.train.items()] + [("eval", *named) for named in self.eval.items()]

    def conflicts(self) -> Iterator[Conflict]:
        """Nothing to train on, duplicate names, sources that do not match the composite."""
        if self.composite is not None and any(self.composite.conflicts()):
            return
        if not self.trained:
            yield Conflict(("train",), "expected at least one weight above 0")
        for name in self.eval:
            if name in self.train:
                yield Conflict(("eval", name), "expected a name that data.train does not have")
        parts = {} if self.composite is None else self.composite.weights()
        missing = ", ".join(name for name, weight in parts.items() if weight > 0 and name not in self.train)
        if missing:
            reason = f"expected sources for {missing}, which data.composite has; or give these a weight of 0 there"
            yield Conflict(("train",), reason)
        for name, source in self.train.items():
            if self.composite is not None and name not in parts and source.weight > 0:
                known = f"expected the name of a part of data.composite ({', '.join(parts)}), or a weight of 0"
                yield Conflict(("train", name), known)
