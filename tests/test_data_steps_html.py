"""HTML to Markdown: what is said stays, with its structure; furniture goes; no page breaks it."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.steps.html import html_to_markdown, markdown_of
from palestra.data.steps.shards import sources

CASES = {
    "<h1>One</h1><h3>Three <em>x</em></h3>": "# One\n\n### Three *x*",
    "<p>a  b\n c<p>d": "a b c\n\nd",
    "a<br>b": "a  \nb",
    '<a href="/x y">t</a>': "[t](/x%20y)",
    "<b> bold </b>word": "**bold** word",
    "<b></b><i> </i>x": "x",
    "<code>a`b</code> <code>c</code>": "`` a`b `` `c`",
    "<ul><li>one<li>two<ol><li>a<li>b</ol><li>three</ul>": "- one\n- two\n  1. a\n  2. b\n- three",
    "<ol start=3><li>c</li><li>d</li></ol>": "3. c\n4. d",
    "<ul><li><p>one</p><p>more</p></li><li>two</li></ul>": "- one\n\n  more\n\n- two",
    "<blockquote><p>a</p><p>b</p></blockquote>c": "> a\n>\n> b\n\nc",
    '<pre><code class="language-python">def f():\n    return 1\n</code></pre>': (
        "```python\ndef f():\n    return 1\n```"
    ),
    "<pre>a\n```\nb</pre>": "````\na\n```\nb\n````",
    "<table><tr><th>A<th>B<tr><td>1<td>2|3</table>": "| A | B |\n| --- | --- |\n| 1 | 2\\|3 |",
    "<table><tr><td>x</td></tr></table>": "x",
    "<table><tr><td>a<table><tr><td>b<td>c</table>d<td>e</table>": "| a b c d | e |\n| --- | --- |",
    "x<hr>y": "x\n\n---\n\ny",
    "<img src=a.png alt='A dog'><img src=b.png>": "![A dog](a.png)",
    "a &amp; b &lt;c&gt; &#233;": "a & b <c> é",
    "<nav><ul><li>menu</ul></nav><p>text</p><footer>end</footer>": "text",
    "<script>if (a < b) document.write('<p>no</p>')</script>x<style>p{}</style>": "x",
    "<div role=navigation>no <div>no</div> no</div>yes": "yes",
    "<div aria-hidden=true>no</div>yes": "yes",
    "</p></div>stray<b>open": "stray**open**",
    "<p>one<div>two</div>three": "one\n\ntwo\n\nthree",
}


@pytest.mark.parametrize("html", CASES)
def test_markdown_of_an_element_is_what_it_says(html: str) -> None:
    assert markdown_of(html).markdown == CASES[html]


def test_markdown_of_a_page_completes_links_and_finds_the_title() -> None:
    page = markdown_of(
        "<html><head><title>A \n page</title></head><body><a href='b.html'>b</a></body>",
        base_url="http://h.org/d/a.html",
    )
    assert (page.title, page.markdown) == ("A page", "[b](http://h.org/d/b.html)")
    assert markdown_of("<a href=x>said</a>", links=False).markdown == "said"


def test_markdown_of_a_page_nested_very_deep_is_read() -> None:
    deep = 5_000
    assert "core" in markdown_of("<div><b>" * deep + "core").markdown


WORDS = st.text(alphabet="abcxyz", min_size=1, max_size=5)
ELEMENTS = "div p b i ul ol li table tr td th pre code blockquote h2 a br span section dl dt dd"
TAGS = st.sampled_from(ELEMENTS.split())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(WORDS, TAGS.map("<{}>".format), TAGS.map("</{}>".format)), max_size=25))
def test_markdown_of_any_soup_keeps_every_word_in_order(parts: list[str]) -> None:
    found = markdown_of(" ".join(parts)).markdown
    if any(part.strip("</>") in ("table", "tr", "td", "th") for part in parts):
        # What stands in a table outside of its cells comes before it, as in a browser.
        assert all(part in found for part in parts if not part.startswith("<"))
        return
    at = 0
    for word in (part for part in parts if not part.startswith("<")):
        at = found.find(word, at)
        assert at >= 0, f"{word!r} is lost in {found!r}"


def test_html_to_markdown_of_files_and_rows_counts_what_is_empty(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.html").write_text("<title>T</title><p>hello</p>")
    (tmp_path / "in/b.html").write_text("<nav>only a menu</nav>")
    html_to_markdown(tmp_path / "out", source=tmp_path / "in", workers=1)
    rows = [row for source in sources(tmp_path / "out") for _, _, row in source.rows()]
    assert rows == [{"id": "a.html:1", "text": "hello", "title": "T"}]
    counts = json.loads((tmp_path / "out/counts.json").read_text())
    assert (counts["rows_in"], counts["dropped"]) == (2, {"nothing but furniture": 1})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"html": "<a href=x>y</a>", "url": "http://h/a/b"}) + "\n")
    html_to_markdown(tmp_path / "two", source=tmp_path / "rows.jsonl", text_key="html", workers=1)
    (row,) = (row for source in sources(tmp_path / "two") for _, _, row in source.rows())
    assert row == {"id": "rows.jsonl:1", "text": "[y](http://h/a/x)", "url": "http://h/a/b"}
