"""Composites: mixtures with a name, as groups of sources, that a spec takes over and changes."""

from typing import Annotated

from pydantic import Field

from palestra.spec.base import Conflict
from palestra.spec.model import Model

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
    },
}
"""By name: the groups, each with its share of all examples and the relative weights of its parts."""


class GroupSpec(Model):
    """Sources that have a share together."""

    share: Share | None = None
    """Its share of all examples, relative to the other groups; null keeps that of `base`."""
    parts: dict[str, Share] = Field(default={})
    """The weight of each part, relative to the others of the group; those of `base` that are not named stay."""


class CompositeSpec(Model):
    """A mixture of groups of sources: one that ships, changed or not, or one of your own."""

    base: str | None = None
    """A composite to begin with: `nemotron_dclm_fineweb_10b`; null begins with nothing."""
    groups: dict[str, GroupSpec] = Field(default={})
    """Groups that are added to those of `base`, or that change them; a share of 0 leaves one out."""

    def weights(self) -> dict[str, float]:
        """The weight of each part; all together are 1."""
        groups = self._groups()
        total = sum(share or 0.0 for share, _ in groups.values())
        found: dict[str, float] = {}
        for share, parts in groups.values():
            inside = sum(parts.values())
            for name, weight in parts.items():
                found[name] = (share or 0.0) / total * weight / inside if weight else 0.0
        return found

    def problems(self) -> list[Conflict]:
        """A base that is not there, groups without a share or without parts, parts of two groups."""
        if self.base is not None and self.base not in COMPOSITES:
            return [Conflict(("base",), f"expected one of {', '.join(COMPOSITES)}, or null")]
        groups = self._groups()
        found = []
        owners: dict[str, str] = {}
        for name, (share, parts) in groups.items():
            if share is None:
                found.append(Conflict(("groups", name, "share"), "expected a number, because `base` has no such group"))
            if share != 0 and not any(parts.values()):
                found.append(Conflict(("groups", name, "parts"), "expected at least one weight above 0"))
            for part in parts:
                if owners.setdefault(part, name) != name:
                    reason = f"expected a name that the group {owners[part]!r} does not have"
                    found.append(Conflict(("groups", name, "parts", part), reason))
        if not found and not any(share for share, _ in groups.values()):
            found.append(Conflict(("groups",), "expected at least one share above 0"))
        return found

    def _groups(self) -> dict[str, tuple[float | None, dict[str, float]]]:
        base = COMPOSITES[self.base] if self.base is not None else {}
        groups: dict[str, tuple[float | None, dict[str, float]]] = {**base}
        for name, change in self.groups.items():
            share, parts = groups.get(name, (None, {}))
            groups[name] = (share if change.share is None else change.share, {**parts, **change.parts})
        return groups
