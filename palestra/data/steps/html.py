"""The step `html_to_markdown`: the main content of pages as Markdown, without navigation and other boilerplate.

trafilatura (https://aclanthology.org/2021.acl-demo.15) finds the main content. Its tree is written as Markdown here:
its own Markdown loses empty lines in code, the code's language and the signs of quotes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from palestra.data.readers import Row
from palestra.data.steps.shards import Compression, Drop, Where, map_documents
from palestra.errors import needs_extra
from palestra.spec.model import Execution

if TYPE_CHECKING:
    from lxml.html import HtmlElement

NO_TEXT = "no main content"
PAGE = re.compile(r"<(?:!doctype|html|head|body)\b", re.IGNORECASE)
SPACES = re.compile(r"[ \t\n\r\f]+")
LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight-source)-([\w+#-]+)")
MARKS = {"#b": "**", "#i": "*", "#t": "`"}
LEFT_OUT = "//body//*[@aria-hidden='true' or @role='navigation' or @role='banner' or @role='contentinfo' or \
@role='search' or @role='complementary' or @role='menu' or @role='dialog']"
DEEPEST = 100
"""Elements inside one another; of deeper ones the text alone is read. Beyond 2,048 the parser stops."""
BLOCKS = re.compile(
    "address|article|blockquote|body|caption|center|cell|d[dlt]|details|div|fieldset|figcaption|figure|head|header|hgroup|"
    "html|item|li|list|main|p|quote|row|section|table|t[dhr]|tbody|tfoot|thead"
)
"""Elements of HTML, and of the tree that trafilatura makes of it, that begin a block of Markdown."""


def html_to_markdown(
    out: Path,
    *,
    source: Where,
    text_key: str = "text",
    base_url: str | None = None,
    links: bool = True,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """The main content of documents whose text is HTML, as Markdown; a page's title comes into the column `title`.

    A fragment, without `<html>`, `<head>` and `<body>`, is content as a whole. Relative links are completed with
    `base_url`, or the column `url` where a row has one; `links: false` keeps only their text.
    """
    _trafilatura()  # before any worker starts
    work, recipe = partial(_convert, base_url, links), {"base_url": base_url, "links": links}
    map_documents(out, source, work, "html_to_markdown", recipe, workers, text_key, None, compression)


@dataclass(frozen=True)
class Page:
    """What is in an HTML page."""

    markdown: str
    title: str | None


def markdown_of(html: str, *, base_url: str | None = None, links: bool = True) -> Page:
    """The main content of a page, or a whole fragment, as Markdown."""
    trafilatura = _trafilatura()
    from lxml import etree
    from lxml.html import HTMLParser, document_fromstring

    # As bytes: lxml refuses texts that declare an encoding of their own. NUL would end the page.
    data = html.replace("\0", "").encode(errors="replace")
    try:
        parser = HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
        tree = document_fromstring(data, parser)
    except etree.ParserError:  # nothing in it
        return Page("", None)
    title = SPACES.sub(" ", tree.findtext(".//title") or "").strip() or None
    writer = _Writer(tree, base_url)
    options = trafilatura.settings.Extractor(comments=False, formatting=True, links=links, tables=True)
    if PAGE.search(html):
        document = trafilatura.bare_extraction(tree, options=options)
        body = None if document is None else document.body
    else:
        body = trafilatura.htmlprocessing.convert_tags(trafilatura.htmlprocessing.tree_cleaning(tree, options), options)
    return Page("" if body is None else "\n\n".join(writer.blocks(body)), title)


class _Writer:
    """Writes a tree of trafilatura as Markdown."""

    def __init__(self, tree: "HtmlElement", base_url: str | None) -> None:
        """Make the page's tree shallow enough for recursion, complete the links and number the blocks of code."""
        self.code: list[tuple[str, str]] = []
        """Language and text of each block of code as it stood in the page: trafilatura trims those in lists."""
        for element in tree.xpath(LEFT_OUT):
            element.drop_tree()
        for element in tree.xpath("/*" * DEEPEST + "//*"):
            element.drop_tag()
        for link in tree.iter("a"):
            url = (link.get("href") or "").strip().replace(" ", "%20").replace("(", "%28").replace(")", "%29")
            try:
                link.set("href", urljoin(base_url, url) if base_url else url)
            except ValueError:  # such as http://[x
                link.set("href", url)
        for pre in list(tree.iter("pre")):
            for line_break in pre.iter("br"):
                line_break.tail = "\n" + (line_break.tail or "")
            classes = " ".join([pre.get("class", ""), *(child.get("class", "") for child in pre.iter("code"))])
            language, text, tail = LANGUAGE.search(classes), pre.text_content(), pre.tail
            pre.clear()
            pre.tag, pre.text, pre.tail = "code", text, tail
            pre.set("rend", f"#{len(self.code)}")
            self.code.append((language[1] if language else "", text.strip("\n").rstrip()))

    def blocks(self, parent: "HtmlElement") -> list[str]:
        """The blocks in an element; the text between them is one, too."""
        blocks: list[str] = []
        inline = [parent.text or ""]

        def end() -> None:
            lines = [SPACES.sub(" ", line).strip() for line in "".join(inline).split("  \n")]
            blocks.extend(["  \n".join(filter(None, lines))] if any(lines) else [])
            inline.clear()

        for child in parent:
            if any(BLOCKS.fullmatch(part.tag) or self._is_code_block(part) for part in child.iter()):
                end()
                blocks += self._block(child)
            else:
                inline.append(self._inline(child))
            inline.append(child.tail or "")
        end()
        return blocks

    def _is_code_block(self, element: "HtmlElement") -> bool:
        return element.tag == "code" and (element.get("rend") or "").startswith("#")

    def _block(self, element: "HtmlElement") -> list[str]:
        if self._is_code_block(element):
            language, text = self.code[int(element.get("rend", "")[1:])]
            fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
            return [f"{fence}{language}\n{text}\n{fence}"] if text else []
        if element.tag == "table" and _all_in(element, [cell for row in _rows(element) for cell in row]):
            return self._table(element)
        if element.tag == "list" and _all_in(element, element.iterchildren("item")):
            return self._list(element)
        inner = self.blocks(element)
        if element.tag == "head" and inner:
            return [f"{'#' * int((element.get('rend') or 'h2')[1:])} {' '.join(inner)}"]
        if element.tag == "quote" and inner:
            return [_prefixed("\n\n".join(inner), "> ", "> ")]
        return inner

    def _list(self, element: "HtmlElement") -> list[str]:
        start = element.get("start") or ""
        number = int(start) if start.isdecimal() else 1
        lines = []
        for item in element:
            bullet = f"{number}. " if element.get("rend") == "ol" else "- "
            # A nested list stands close to the line that it belongs to.
            inner = re.sub(r"\n\n(?=(?:- |\d+\. ))", "\n", "\n\n".join(self.blocks(item)))
            if inner:
                lines.append(_prefixed(inner, bullet, " " * len(bullet)))
                number += 1
        return ["\n".join(lines)] if lines else []

    def _table(self, table: "HtmlElement") -> list[str]:
        texts = ([SPACES.sub(" ", self._inline(cell)).strip() for cell in row] for row in _rows(table))
        rows = [[text.replace("|", "\\|") for text in row] for row in texts if any(row)]
        width = max(map(len, rows), default=0)
        if width < 2:  # a table for the layout
            return [row[0] for row in rows]
        head, *body = [row + [""] * (width - len(row)) for row in rows]
        return ["\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * width, *body))]

    def _inline(self, element: "HtmlElement") -> str:
        """A part of a line; its mark goes around the text, not around the blanks at its ends."""
        if element.tag == "lb":
            return "  \n"
        inner = (element.text or "") + "".join(self._inline(part) + (part.tail or "") for part in element)
        if BLOCKS.fullmatch(element.tag):
            inner = f" {inner} "
        if not (text := inner.strip()):
            return inner
        if element.tag == "ref" and element.get("target"):
            marked = f"[{text}]({element.get('target')})"
        else:
            mark = {"code": "`", "del": "~~"}.get(element.tag) or MARKS.get(element.get("rend") or "", "")
            marked = f"`` {text} ``" if mark == "`" and "`" in text else f"{mark}{text}{mark}"
        return inner.replace(text, marked)


def _rows(table: "HtmlElement") -> "list[list[HtmlElement]]":
    """The cells of each row, without those of tables in it."""
    own = (row for row in table.iter("row", "tr") if next(row.iterancestors("table")) is table)
    return [list(row.iterchildren("cell", "td", "th")) for row in own]


def _all_in(element: "HtmlElement", parts: "Iterable[HtmlElement]") -> bool:
    """Whether all text of an element is in these parts; in malformed pages some lies between the cells of a table."""
    inside = "".join(text for part in parts for text in part.itertext())
    return SPACES.sub("", "".join(element.itertext())) == SPACES.sub("", inside)


def _prefixed(text: str, first: str, others: str) -> str:
    lines = text.split("\n")
    return "\n".join([first + lines[0], *(others + line if line else others.rstrip() for line in lines[1:])])


def _trafilatura() -> Any:
    with needs_extra("html_to_markdown", "data"):
        import trafilatura
        import trafilatura.htmlprocessing
        import trafilatura.settings
    return trafilatura


def _convert(base_url: str | None, links: bool, _: int, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    for row in rows:
        url = row.get("url")
        page = markdown_of(row["text"], base_url=url if isinstance(url, str) and url else base_url, links=links)
        if not page.markdown:
            yield Drop(NO_TEXT)
            continue
        title = {} if page.title is None or row.get("title") else {"title": page.title}
        yield {**row, "text": page.markdown, **title}
