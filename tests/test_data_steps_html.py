"""HTML to Markdown: main content stays with its structure, boilerplate goes, no page breaks it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from html_pages import PAGES, fit
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.steps.html import html_to_markdown, markdown_of
from palestra.data.steps.shards import sources
from palestra.errors import MissingExtra

FRAGMENTS = {
    "<h1>One</h1><h3>Three <em>x</em></h3>": "# One\n\n### Three *x*",
    "<p>a  b\n c<p>d": "a b c\n\nd",
    "a<br>b": "a  \nb",
    '<a href="/x y">t</a>': "[t](/x%20y)",
    "<b> bold </b>word": "**bold** word",
    "<b></b><i> </i>x": "x",
    "<code>a`b</code> <code>c</code>": "`` a`b `` `c`",
    "<ul><li>one<li>two<ol><li>a<li>b</ol><li>three</ul>": "- one\n- two\n  1. a\n  2. b\n- three",
    "<ol start=3><li>c</li><li>d</li></ol>": "3. c\n4. d",
    "<ul><li>Run:<pre>a\n\n  b  \nc</pre></li><li>two</li></ul>": (
        "- Run:\n\n  ```\n  a\n\n    b  \n  c\n  ```\n- two"
    ),
    "<blockquote><p>a</p><p>b</p></blockquote>c": "> a\n>\n> b\n\nc",
    '<pre><code class="language-python">def f():\n\n    return 1\n</code></pre>': (
        "```python\ndef f():\n\n    return 1\n```"
    ),
    "<pre><span class=k>a</span> = 1<br>b</pre>": "```\na = 1\nb\n```",
    "<pre>a\n```\nb</pre>": "````\na\n```\nb\n````",
    "<table><tr><th>A<th>B<tr><td>1<td>2|3</table>": "| A | B |\n| --- | --- |\n| 1 | 2\\|3 |",
    "<table><tr><td>x</td></tr></table>": "x",
    "<table><tr><td>a<table><tr><td>b<td>c</table>d<td>e</table>": "| a b c d | e |\n| --- | --- |",
    "a &amp; b &lt;c&gt; &#233;": "a & b <c> é",
    "<nav><ul><li>menu</ul></nav><p>text</p><footer>end</footer>": "text",
    "<script>if (a < b) document.write('<p>no</p>')</script>x<style>p{}</style>": "x",
    "<div role=navigation>no <div>no</div> no</div>yes": "yes",
    "<div aria-hidden=true>no</div>yes": "yes",
    "</p></div>stray<b>open": "stray**open**",
    "<p>one<div>two</div>three": "one\n\ntwo\n\nthree",
    "": "",
    "<!-- nothing -->": "",
    "no tags at all": "no tags at all",
    "a\0b": "ab",
    "<a href='http://[x'>y</a>": "[y](http://[x)",
}


@pytest.mark.parametrize("html", FRAGMENTS)
def test_markdown_of_a_fragment_is_all_of_it(html: str) -> None:
    assert markdown_of(html).markdown == FRAGMENTS[html]


@pytest.mark.parametrize("name", PAGES)
def test_markdown_of_a_page_is_its_main_content(name: str) -> None:
    f1, boilerplate = fit(markdown_of(PAGES[name].html).markdown, PAGES[name])
    assert f1 >= (0.75 if name == "product" else 0.95)
    assert boilerplate <= (1.0 if name == "old tables" else 0.2)


def test_markdown_of_all_pages_fits_as_measured() -> None:
    fits = [fit(markdown_of(sample.html).markdown, sample) for sample in PAGES.values()]
    assert sum(f1 for f1, _ in fits) / len(fits) > 0.95
    assert sum(boilerplate for _, boilerplate in fits) / len(fits) < 0.15


def test_markdown_of_a_page_keeps_code_tables_lists_and_headings() -> None:
    blog, docs, recipe = (markdown_of(PAGES[name].html).markdown for name in ("blog", "docs", "recipe"))
    assert "```python\ndef by_team_then_age(people):\n    people = sorted(people, key=lambda p: p.age)\n\n    " in blog
    assert "Python's `sorted` is stable" in blog
    assert "## When the directions differ" in blog
    assert "| Key | Default | Meaning |\n| --- | --- | --- |\n| port | 8080 | Where the server listens |" in docs
    assert "```\nkill -HUP $(cat app.pid)\n```" in docs
    assert "- Juice of a lemon" in recipe
    assert "\n2. Add garlic and ginger and stir for one minute more.\n3. Pour" in recipe


def test_markdown_of_a_page_completes_links_and_finds_the_title() -> None:
    sample = PAGES["wiki"].html.replace("/wiki/Europe", "europe.html")
    page = markdown_of(sample.replace("Little owl", "Little \n owl"), base_url="http://h.org/d/a.html")
    assert page.title == "Little owl"
    assert "[Europe](http://h.org/d/europe.html)" in page.markdown
    assert "of Europe, Asia" in markdown_of(sample, links=False).markdown
    assert "[Europe](europe.html)" in markdown_of(sample).markdown


def test_markdown_of_a_page_that_declares_another_encoding_reads_the_text_as_it_is() -> None:
    for declared in ('<?xml version="1.0" encoding="iso-8859-1"?>', "<meta charset='shift_jis'>", "\ufeff"):
        html = declared + PAGES["German"].html
        assert "Anwohner haben sich daran gewöhnt" in markdown_of(html).markdown


def test_markdown_of_a_page_is_the_same_bytes_in_every_process() -> None:
    code = "import html_pages; from palestra.data.steps.html import markdown_of\n"
    code += "print(ascii([markdown_of(page.html).markdown for page in html_pages.PAGES.values()]))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == ascii([markdown_of(page.html).markdown for page in PAGES.values()])


def test_markdown_of_a_page_nested_deep_is_read() -> None:
    assert "core" in markdown_of("<div><b>" * 900 + "core").markdown
    body = "<html><body>" + "<ul><li>" * 900 + "The core of this page is a sentence of some length. " * 9
    assert "The core of this page" in markdown_of(body).markdown
    assert markdown_of("<div>" * 100_000 + "x").title is None  # the parser gives up; nothing is raised


def test_markdown_of_a_huge_page_is_all_of_its_text() -> None:
    text = "<p>Paragraph {} tells of a bridge over the harbour and of the ships below it.</p>"
    html = "<html><body><article>" + "".join(text.format(n) for n in range(3000)) + "</article></body></html>"
    found = markdown_of(html).markdown
    assert found.startswith("Paragraph 0 tells")
    assert found.count("\n\n") == 2999


WORDS = st.text(alphabet="abcxyz", min_size=1, max_size=5)
ELEMENTS = "div p b i ul ol li table tr td th pre code blockquote h2 a br span section dl dt dd"
TAGS = st.sampled_from(ELEMENTS.split())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(WORDS, TAGS.map("<{}>".format), TAGS.map("</{}>".format)), max_size=25))
def test_markdown_of_any_soup_keeps_every_word(parts: list[str]) -> None:
    found = markdown_of(" ".join(parts)).markdown
    assert all(part in found for part in parts if not part.startswith("<"))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_markdown_of_any_text_raises_nothing(text: str) -> None:
    markdown_of(text)
    markdown_of(f"<html><body>{text}</body></html>", base_url=text)


def test_html_to_markdown_of_files_and_rows_counts_what_is_empty(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.html").write_text("<title>T</title><p>hello</p>")
    (tmp_path / "in/b.html").write_text("<nav>only a menu</nav>")
    html_to_markdown(tmp_path / "out", source=tmp_path / "in", workers=1)
    rows = [row for source in sources(tmp_path / "out") for _, _, row in source.rows()]
    assert rows == [{"id": "a.html:1", "text": "hello", "title": "T"}]
    counts = json.loads((tmp_path / "out/counts.json").read_text())
    assert (counts["rows_in"], counts["dropped"]) == (2, {"no main content": 1})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"html": "<a href=x>y</a>", "url": "http://h/a/b"}) + "\n")
    html_to_markdown(tmp_path / "two", source=tmp_path / "rows.jsonl", text_key="html", workers=1)
    (row,) = (row for source in sources(tmp_path / "two") for _, _, row in source.rows())
    assert row == {"id": "rows.jsonl:1", "text": "[y](http://h/a/x)", "url": "http://h/a/b"}


def test_html_to_markdown_without_its_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "trafilatura"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(MissingExtra, match=r"palestra\[data\]"):
        html_to_markdown(tmp_path / "out", source=tmp_path)
