"""The graph of steps as SVG: inputs above those who need them, in layers, with few crossings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 190.0, 50.0
GAP, BEND, LAYER_GAP, MARGIN = 22.0, 14.0, 40.0, 12.0
"""Between boxes; the room that an edge takes where it passes a layer; between layers; around all. Pixels."""
SWEEPS = 12
SMALLEST = 0.55
"""As far as a picture that is wider than the page is made smaller; beyond that it scrolls."""


@dataclass(frozen=True)
class Box:
    """A step as it is drawn."""

    key: str
    title: str
    note: str = ""
    state: str = "waiting"
    """A class of the style sheet: done, ran, running, failed, blocked, waiting."""
    link: str = ""
    needs: tuple[str, ...] = ()
    """The keys of its inputs; those that are not drawn are left out."""


@dataclass
class _Place:
    """A box in its layer, or the bend of an edge that passes the layer."""

    width: float
    above: list["_Place"] = field(default_factory=list)
    below: list["_Place"] = field(default_factory=list)
    x: float = 0.0
    """The middle."""


def picture(boxes: Sequence[Box]) -> tuple[str, float]:
    """One `<svg>` of the boxes, inputs first, and the edges between them; and how wide it is."""
    layers, places, chains = _layers(boxes)
    _untangle(layers)
    _straighten(layers)
    left = min((one.x - one.width / 2 for layer in layers for one in layer), default=0.0)
    for layer in layers:
        for one in layer:
            one.x += MARGIN - left
    width = max((one.x + one.width / 2 for layer in layers for one in layer), default=0.0) + MARGIN
    height = len(layers) * (HEIGHT + LAYER_GAP) - LAYER_GAP + 2 * MARGIN
    tops = {id(one): _top(level) for level, layer in enumerate(layers) for one in layer}
    edges = [_edge([(one.x, tops[id(one)]) for one in chain]) for chain in chains]
    drawn = [_box(box, places[box.key].x, tops[id(places[box.key])]) for box in boxes]
    head = (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="min-width: {SMALLEST * width:.0f}px" '
        'role="img" aria-label="the graph of steps">'
    )
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return "\n".join([head, arrow, *edges, *drawn, "</svg>"]), width


def depths(boxes: Sequence[Box]) -> dict[str, int]:
    """The layer of each box: one below the lowest of its inputs; without inputs, one above the first that needs it."""
    found: dict[str, int] = {}
    for box in boxes:
        found[box.key] = max((found[key] + 1 for key in box.needs if key in found), default=0)
    needed: dict[str, int] = {}
    for box in boxes:
        for key in box.needs:
            needed[key] = min(found[box.key], needed.get(key, found[box.key]))
    return {key: needed[key] - 1 if level == 0 and key in needed else level for key, level in found.items()}


def _layers(boxes: Sequence[Box]) -> tuple[list[list[_Place]], dict[str, _Place], list[list[_Place]]]:
    """Boxes and bends by layer, the place of each box, and the places that each edge goes through."""
    depth = depths(boxes)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    places: dict[str, _Place] = {}
    chains = []
    for box in boxes:
        place = places[box.key] = _Place(WIDTH)
        for key in box.needs:
            if key in places:
                bends = [_Place(BEND) for _ in range(depth[key] + 1, depth[box.key])]
                for level, bend in enumerate(bends, depth[key] + 1):
                    layers[level].append(bend)
                chain = [places[key], *bends, place]
                for upper, lower in pairwise(chain):
                    upper.below.append(lower)
                    lower.above.append(upper)
                chains.append(chain)
        layers[depth[box.key]].append(place)
    return layers, places, chains


def _untangle(layers: list[list[_Place]]) -> None:
    """Order each layer by the middle of its neighbours', downwards and upwards in turn (Sugiyama et al. 1981)."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for level, layer in list(enumerate(layers))[:: 1 if down else -1]:
            beside = layers[level - 1 if down else level + 1] if 0 <= level + (-1 if down else 1) < len(layers) else []
            rank = {id(one): place for place, one in enumerate(beside)}
            own = {id(one): place for place, one in enumerate(layer)}
            middles = {}
            for one in layer:
                near = [rank[id(other)] for other in (one.above if down else one.below)]
                scale = len(layer) / max(1, len(beside))
                middles[id(one)] = scale * sum(near) / len(near) if near else own[id(one)]
            layer.sort(key=lambda one: (middles[id(one)], own[id(one)]))


def _straighten(layers: list[list[_Place]]) -> None:
    """Put each place below its inputs, and above those who need it, as far as its neighbours let it."""
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers[:: 1 if down else -1]:
            wanted = []
            for one in layer:
                near = (one.above if down else one.below) or [one]
                wanted.append(sum(other.x for other in near) / len(near))
            _spread(layer, wanted)


def _spread(layer: list[_Place], wanted: list[float]) -> None:
    """Positions in the given order, as near as can be to the wanted ones on the mean, without overlaps."""
    right = float("-inf")
    for one, x in zip(layer, wanted, strict=True):
        one.x = max(x, right + GAP + one.width / 2)
        right = one.x + one.width / 2
    shift = sum(x - one.x for one, x in zip(layer, wanted, strict=True)) / max(1, len(layer))
    for one in layer:
        one.x += shift


def _top(level: int) -> float:
    return MARGIN + level * (HEIGHT + LAYER_GAP)


def _edge(points: list[tuple[float, float]]) -> str:
    """A curve from the bottom of a box through bends to the top of another."""
    x, top = points[0]
    path = [f"M{x:.1f} {top + HEIGHT:.1f}"]
    y = top + HEIGHT
    for place, (to, top) in enumerate(points[1:], 1):
        middle = (y + top) / 2
        path.append(f"C{x:.1f} {middle:.1f} {to:.1f} {middle:.1f} {to:.1f} {top:.1f}")
        x, y = to, top
        if place < len(points) - 1:  # straight past the layer
            y = top + HEIGHT
            path.append(f"V{y:.1f}")
    return f'<path class="edge" d="{"".join(path)}" marker-end="url(#arrow)"/>'


def _box(box: Box, x: float, top: float) -> str:
    inside = (
        f'<g class="box {escape(box.state)}"><title>{escape(box.key)}</title>'
        f'<rect x="{x - WIDTH / 2:.1f}" y="{top:.1f}" width="{WIDTH:g}" height="{HEIGHT:g}" rx="7"/>'
        f'<text x="{x:.1f}" y="{top + 21:.1f}">{escape(_cut(box.title, 22))}</text>'
        f'<text class="note" x="{x:.1f}" y="{top + 38:.1f}">{escape(_cut(box.note, 30))}</text></g>'
    )
    return f'<a href="{escape(box.link)}">{inside}</a>' if box.link else inside


def _cut(text: str, most: int) -> str:
    """Without its middle where it is too long: names often differ at their ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[: most - half - 1]}…{text[-half:]}"
