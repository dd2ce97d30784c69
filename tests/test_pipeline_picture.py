"""The picture of a graph and the page of a pipeline."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import UsageError
from palestra.pipeline import Execution, Step
from palestra.pipeline.graph import Graph, explain
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.report import GAP, HEIGHT, WIDTH, Box, depths, picture, write_report
from palestra.pipeline.runner import PipelineFailed, run

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    boxes = []
    for number in range(count):
        needs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        boxes.append(Box(f"k{number}", f"step <{number}>", "a & b", needs=tuple(f"k{one}" for one in sorted(needs))))
    return boxes


def drawn(boxes) -> tuple[dict[str, tuple[float, float]], list[str]]:
    root = ElementTree.fromstring(picture(boxes)[0])
    corners = {}
    for group in root.iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert rect is not None
        assert title is not None
        assert title.text
        corners[title.text] = (float(rect.attrib["x"]), float(rect.attrib["y"]))
    edges = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.attrib.get("class") == "edge"]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= x <= width - WIDTH and 0 <= y <= height - HEIGHT for x, y in corners.values())
    return corners, edges


@settings(max_examples=60)
@given(graphs())
def test_boxes_do_not_overlap_lie_below_their_inputs_and_edges_join_them(boxes):
    corners, edges = drawn(boxes)
    assert set(corners) == {box.key for box in boxes}
    places = list(corners.values())
    for index, (x, y) in enumerate(places):
        for other, level in places[index + 1 :]:
            assert level != y or abs(other - x) >= WIDTH + GAP - 0.2
    ends = []
    for edge in edges:
        found = [float(number) for number in re.findall(r"-?[0-9.]+", edge)]
        ends.append((found[0], found[1], found[-2], found[-1]))
    for box in boxes:
        for key in box.needs:
            assert corners[key][1] < corners[box.key][1]
            wanted = (
                corners[key][0] + WIDTH / 2,
                corners[key][1] + HEIGHT,
                corners[box.key][0] + WIDTH / 2,
                corners[box.key][1],
            )
            assert any(all(abs(a - b) < 0.2 for a, b in zip(wanted, end, strict=True)) for end in ends)
    assert len(edges) == sum(len(box.needs) for box in boxes)


def test_chain_is_a_straight_column_and_a_crossing_that_can_be_avoided_is():
    corners, _ = drawn([Box("a", "a"), Box("b", "b", needs=("a",)), Box("c", "c", needs=("b",))])
    assert len({x for x, _ in corners.values()}) == 1
    crossed = [Box("a", "a"), Box("b", "b"), Box("c", "c", needs=("b",)), Box("d", "d", needs=("a",))]
    corners, _ = drawn(crossed)
    assert (corners["a"][0] < corners["b"][0]) == (corners["d"][0] < corners["c"][0])


def test_depth_is_the_longest_way_from_a_step_without_inputs():
    boxes = [Box("a", ""), Box("b", "", needs=("a",)), Box("c", "", needs=("a", "b")), Box("d", "", needs=("gone",))]
    assert depths(boxes) == {"a": 0, "b": 1, "c": 2, "d": 0}


def test_step_without_inputs_stands_right_above_the_first_that_needs_it():
    boxes = [Box("a", ""), Box("b", "", needs=("a",)), Box("late", ""), Box("c", "", needs=("b", "late")),
             Box("d", "", needs=("c", "late"))]  # fmt: skip
    assert depths(boxes) == {"a": 0, "b": 1, "late": 1, "c": 2, "d": 3}


def test_long_name_keeps_both_its_ends():
    text, _ = picture([Box("k", f"the_same_beginning_of_names_{number}") for number in (17, 23)])
    assert "the_same_b…of_names_17" in text
    assert "the_same_b…of_names_23" in text


def make(out: Path, *, text: str, source: Path | None = None, workers: Execution[int] = 1) -> None:
    print(f"made <{text}>")
    if text == "bad":
        raise ValueError("no <luck>")
    counts = {"rows_in": 1200, "rows_out": 1000, "dropped": {"too short": 200}, "seconds": 0.5}
    (out / "counts.json").write_text(json.dumps(counts))


class _Checked(HTMLParser):
    """Collects text and sees that every tag that must be closed is."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "path", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parsed(path: Path) -> str:
    page = _Checked()
    page.feed(path.read_text())
    page.close()
    assert page.open == []
    return " ".join(page.words)


@pytest.fixture
def steps():
    first = Step("first", make, {"text": "one", "source": None, "workers": 3})
    bad = Step("bad", make, {"text": "bad", "source": first / "x", "workers": 1})
    return [first, bad, Step("last", make, {"text": "three", "source": bad / "x", "workers": 1})]


def test_report_tells_states_counts_errors_and_logs_and_asks_nobody_else(tmp_path, steps):
    outputs, graph = Outputs(tmp_path), Graph(steps)
    nothing = Path(write_report("early", graph, outputs))
    assert "3 steps: 3 waiting" in parsed(nothing)
    with pytest.raises(PipelineFailed):
        run(steps, outputs)
    states = {graph.address(steps[2]): "blocked", graph.address(steps[0]): "ran"}
    path = Path(write_report("pipe", graph, outputs, states))
    text = parsed(path)
    assert path == tmp_path / "report-pipe.html"
    assert "3 steps: 1 ran, 1 failed, 1 blocked" in text
    for said in ("1,200", "too short 200", "ValueError: no <luck>", "made <bad>", "Traceback", *graph.nodes):
        assert said in text
    assert not re.search(r'(src|href)="(?!#|data:)|@import|url\((?!#)', path.read_text())


def test_explanation_has_what_counts_what_does_not_and_what_differs(tmp_path, steps):
    outputs = Outputs(tmp_path)
    run(steps[:1], outputs)
    changed = Step("first", make, {"text": "two", "source": None, "workers": 9})
    about = explain(Graph([changed]), outputs, "first")
    assert not about.done
    assert about.made_of == {"name": "first", "text": '"two"', "source": "null"}
    assert about.left_out == {"workers": "9"}
    assert about.other == Graph(steps[:1]).targets[0]
    assert about.differences == [("text", '"one"', '"two"')]
    same = explain(Graph(steps), outputs, "first")
    assert same.done
    assert same.other is None
    with pytest.raises(UsageError, match="no step is called second; there are first, bad, last"):
        explain(Graph(steps), outputs, "second")
