"""The diagrams of the manual, drawn as SVG: `python docs/generate.py` writes them to docs/images/.

A box is (x, y, width, lines of text); an arrow is a list of points. Colors follow the reader's light or dark screen.
"""

from collections.abc import Callable, Sequence
from html import escape

Point = tuple[float, float]

LINE = 18
_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
  .mono { font: 13px ui-monospace, monospace; text-anchor: start }
  .small { font-size: 12px; fill: #59636e }
  .left { text-anchor: start }
  rect { fill: #f6f8fa; stroke: #818b98; rx: 6 }
  .strong { fill: #ddf4ff; stroke: #0969da }
  .v0 { fill: #ddf4ff; stroke: #0969da } .v1 { fill: #dafbe1; stroke: #1a7f37 } .v2 { fill: #fff8c5; stroke: #9a6700 }
  path { fill: none; stroke: #59636e; stroke-width: 1.5; marker-end: url(#tip) }
  marker path { fill: #59636e; stroke: none }
  .dashed { stroke-dasharray: 5 4; marker-end: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #d1d7e0 } .small { fill: #9198a1 }
    rect { fill: #262c36; stroke: #656c76 }
    .strong, .v0 { fill: #1c3a5e; stroke: #4493f8 } .v1 { fill: #1b4a2a; stroke: #3fb950 }
    .v2 { fill: #4d3a0b; stroke: #d29922 }
    path { stroke: #9198a1 } marker path { fill: #9198a1 }
  }
"""


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole picture."""
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" width="{width}">'
    defs = f"<style>{_STYLE}</style><defs>{tip}<path d='M0 0 8 4 0 8z'/></marker></defs>"
    return "\n".join([head, f"<title>{escape(title)}</title>", defs, *parts, "</svg>"]) + "\n"


def box(x: float, y: float, width: float, lines: Sequence[str], kind: str = "", small: int = 1) -> str:
    """A box with centered lines; those from `small` on are in small print."""
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{len(lines) * LINE + 14}"/>'
    return "".join([shape, *(
        label(x + width / 2, y + LINE * (place + 1) + 2, line, "small" if place >= small else "")
        for place, line in enumerate(lines)
    )])  # fmt: skip


def label(x: float, y: float, text: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def arrow(*points: Point, kind: str = "") -> str:
    """A line through points that ends in a tip."""
    return f'<path class="{kind}" d="M{" L".join(f"{x} {y}" for x, y in points)}"/>'


def spec_to_folder() -> str:
    """One spec, one run, one folder, and what only reads the folder."""
    tree = [
        "spec.yaml, manifest.json",
        "status.json, lease.json",
        "metrics.jsonl, rollouts.jsonl",
        "checkpoints/step_N/",
    ]
    parts = [
        box(10, 40, 150, ["spec.yaml", "extends, ${variables}"], "strong"),
        box(10, 130, 150, ["overrides", "algorithm.lr=1e-3"]),
        box(220, 80, 150, ["resolved spec", "every value with", "its origin"], "strong"),
        box(430, 20, 140, ["session, seed 0"]),
        box(430, 80, 140, ["session, seed 1"]),
        box(430, 140, 140, ["session, seed …"]),
        '<rect x="630" y="10" width="250" height="190"/>',
        label(755, 32, "runs/<name>/<id>/sessions/<seed>/", "small"),
        *(label(645, 62 + 26 * place, line, "mono") for place, line in enumerate(tree)),
        label(755, 180, "plain files, renamed into place", "small"),
        arrow((160, 65), (190, 65), (190, 105), (218, 105)),
        arrow((160, 155), (190, 155), (190, 120), (218, 120)),
        arrow((370, 112), (400, 112), (400, 36), (428, 36)),
        arrow((370, 112), (400, 112), (400, 96), (428, 96)),
        arrow((370, 112), (400, 112), (400, 156), (428, 156)),
        arrow((570, 36), (600, 36), (600, 96), (628, 96)),
        arrow((570, 96), (628, 96)),
        arrow((570, 156), (600, 156), (600, 96), (628, 96)),
        box(630, 240, 250, ["runs, plot, diff, rollouts, eval, chat", "read the folder, change nothing"]),
        box(220, 240, 350, ["train --resume", "continues from the newest checkpoint"]),
        arrow((755, 200), (755, 238)),
        arrow((630, 180), (590, 180), (590, 263), (572, 263)),
        arrow((500, 240), (500, 174)),
    ]
    return svg(890, 300, "From a spec to a run folder", parts)


def loop() -> str:
    """The loop of post-training: rollouts, verdicts, groups, batch, a new version of the weights."""
    parts = [
        box(10, 60, 110, ["task", "prompts"], "strong"),
        box(160, 60, 130, ["admission", "at most staleness", "versions ahead"]),
        box(330, 60, 130, ["generator", "tokens with", "their version"], "v1"),
        box(500, 60, 130, ["verifier", "score and status"], "strong"),
        box(670, 60, 130, ["group", "one prompt,", "n completions"]),
        box(670, 200, 130, ["filter", "equal rewards?"]),
        box(500, 200, 130, ["batch", "advantages"]),
        box(330, 200, 130, ["optimizer step", "version + 1"], "v2"),
        arrow((120, 84), (158, 84)),
        arrow((290, 84), (328, 84)),
        arrow((460, 84), (498, 84)),
        arrow((630, 84), (668, 84)),
        arrow((735, 128), (735, 198)),
        arrow((670, 225), (632, 225)),
        arrow((500, 225), (462, 225)),
        arrow((395, 200), (395, 130)),
        label(402, 170, "publish", "small left"),
        arrow((330, 225), (225, 225), (225, 130)),
        label(160, 245, "room for new prompts", "small left"),
        arrow((800, 225), (830, 225), (830, 30), (225, 30), (225, 58), kind="dashed"),
        label(520, 22, "a filtered group is replaced by another prompt", "small"),
    ]
    return svg(850, 270, "The loop of post-training", parts)


def staleness() -> str:
    """Versions and staleness on a time axis: which version sampled a token, how far behind it is when trained."""
    steps = [(90, "step 1 → version 1"), (330, "step 2 → version 2"), (570, "step 3 → version 3")]
    parts = [label(10, 50, "trainer", "left"), label(10, 130, "group A", "left"), label(10, 180, "group B", "left")]
    parts += [box(x, 28, 210, [text], f"v{place}") for place, (x, text) in enumerate(steps)]
    for x in (300, 540):
        parts.append(arrow((x, 15), (x, 250), kind="dashed"))
    parts += [
        label(300, 268, "publish version 1", "small"),
        label(540, 268, "publish version 2", "small"),
        '<rect class="v0" x="110" y="110" width="130" height="30"/>',
        label(175, 130, "version 0"),
        '<rect class="v0" x="180" y="160" width="120" height="30"/>',
        '<rect class="v1" x="300" y="160" width="90" height="30"/>',
        label(240, 180, "version 0"),
        label(345, 180, "version 1"),
        arrow((240, 125), (430, 125), (430, 62)),
        label(440, 112, "staleness 1", "small left"),
        arrow((390, 175), (660, 175), (660, 62)),
        label(548, 208, "staleness 2: the first tokens of B are", "small left"),
        label(548, 226, "2 versions behind, the last ones 1;", "small left"),
        label(548, 244, "allowed from staleness: 2 on", "small left"),
    ]
    return svg(820, 280, "Versions and staleness", parts)


DIAGRAMS: dict[str, Callable[[], str]] = {"spec_to_folder": spec_to_folder, "loop": loop, "staleness": staleness}
"""The pictures by file name."""
