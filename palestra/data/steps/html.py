"""The step `html_to_markdown`: pages as Markdown, without scripts, navigation and other furniture.

Read with the parser of the standard library, which copes with unclosed and crossing tags. Nothing is nested in the
call stack, so no page is too deep.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

from palestra.data.readers import Row
from palestra.data.steps.shards import Compression, Drop, Where, map_documents
from palestra.spec.model import Execution


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LEFT_OUT = _names("script style noscript template svg math canvas iframe object nav footer aside form button select")
"""Elements that are left out with all that is in them, beside what says of itself that it is navigation."""
ROLES_LEFT_OUT = frozenset(("navigation", "banner", "contentinfo", "search", "complementary", "menu", "dialog"))
VOID = _names("area base br col embed hr img input link meta source track wbr")
HEADINGS = {f"h{level}": level for level in range(1, 7)}
BLOCKS = _names(
    "address article blockquote body center dd details div dl dt fieldset figcaption figure header hgroup html li main "
    "ol p pre section summary table tbody td tfoot th thead tr ul caption h1 h2 h3 h4 h5 h6"
)
MARKS = {"strong": "**", "b": "**", "em": "*", "i": "*", "del": "~~", "s": "~~"}
CLOSED_BY = {
    "p": _names("p ul ol dl table pre blockquote div section article h1 h2 h3 h4 h5 h6 hr li td th dd dt"),
    "li": frozenset(("li",)),
    "dt": frozenset(("dt", "dd")),
    "dd": frozenset(("dt", "dd")),
    "td": frozenset(("td", "th", "tr", "tbody", "tfoot")),
    "th": frozenset(("td", "th", "tr", "tbody", "tfoot")),
    "tr": frozenset(("tr", "tbody", "tfoot")),
}
"""Elements that end where one of these begins, as in HTML without end tags."""
OWN_SCOPE = {"li": ("ul", "ol"), "dt": ("dl",), "dd": ("dl",), "td": ("table",), "th": ("table",), "tr": ("table",)}
NO_TEXT = "nothing but furniture"
DEEPEST = 512
"""Elements inside one another; in deeper ones only the text is read, as browsers do."""
SPACES = re.compile(r"[ \t\n\r\f]+")
LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight-source)-([\w+#-]+)")


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
    """The documents of a source, whose text is HTML, as Markdown; a page's title comes into the column `title`.

    Relative links are completed with `base_url`, or the column `url` where a row has one; `links: false` keeps only
    what they say.
    """
    map_documents(
        out,
        source,
        _Convert(base_url, links),
        step="html_to_markdown",
        recipe={"base_url": base_url, "links": links},
        workers=workers,
        text_key=text_key,
        compression=compression,
    )


@dataclass(frozen=True)
class Page:
    """What is in an HTML page."""

    markdown: str
    title: str | None


def markdown_of(html: str, *, base_url: str | None = None, links: bool = True) -> Page:
    """A page as Markdown."""
    writer = _Writer(base_url, links)
    writer.feed(html)
    writer.close()
    return Page(writer.finish(), SPACES.sub(" ", "".join(writer.title)).strip() or None)


@dataclass
class _Open:
    """An element that is not closed yet."""

    tag: str
    begins: int = 0
    """Of a link or a mark: where in the text of the block it begins."""
    href: str | None = None
    number: int = 0
    """Of an ordered list: the next item's."""
    rows: list[list[str]] = field(default_factory=list)
    """Of a table."""
    cells: list[str] = field(default_factory=list)
    """Of a row."""


class _Writer(HTMLParser):
    def __init__(self, base_url: str | None, links: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.base_url, self.links = base_url, links
        self.blocks: list[str] = []
        self.text: list[str] = []  # of the block that is being read
        self.open: list[_Open] = []
        self.skipped: list[str] = []  # open elements from the first that is left out
        self.title: list[str] = []
        self.in_title = self.pre = False
        self.first_of_item = False
        self.language = ""

    # What the parser calls

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        values = {name: value or "" for name, value in attrs}
        if self.skipped:
            if tag not in VOID:
                self.skipped.append(tag)
            return
        if tag in LEFT_OUT or (
            tag not in VOID and (values.get("role") in ROLES_LEFT_OUT or values.get("aria-hidden") == "true")
        ):
            self.skipped.append(tag)
            return
        self._close_implied(tag)
        if tag == "title" and not any(one.tag == "body" for one in self.open):
            self.in_title = True
        elif tag == "br":
            self.text.append("\n" if self.pre else "  \n")
        elif tag == "hr":
            self._end_block()
            self._add("---")
        elif tag == "img":
            if alt := SPACES.sub(" ", values.get("alt", "")).strip():
                self.text.append(f"![{alt}]({self._complete(values.get('src', ''))})" if self.links else alt)
        elif tag not in VOID and len(self.open) < DEEPEST:
            self._begin(tag, values)

    def handle_endtag(self, tag: str) -> None:
        """An element ends; with it, those in it that nobody closed."""
        if self.skipped:
            if tag in self.skipped:
                del self.skipped[len(self.skipped) - 1 - self.skipped[::-1].index(tag) :]
            return
        if tag == "title":
            self.in_title = False
        if any(one.tag == tag for one in self.open):
            while self._end(self.open.pop()) != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Text."""
        if self.in_title:
            self.title.append(data)
        elif not self.skipped:
            self.text.append(data if self.pre else SPACES.sub(" ", data))

    def finish(self) -> str:
        """All that was read."""
        while self.open:
            self._end(self.open.pop())
        self._end_block()
        return re.sub(r"\n{3,}", "\n\n", "".join(self.blocks)).strip()

    # Elements

    def _begin(self, tag: str, values: dict[str, str]) -> None:
        if tag in BLOCKS:
            self._end_block()
        element = _Open(tag, len(self.text))
        if tag == "a" and values.get("href") and self.links:
            element.href = self._complete(values["href"])
        elif tag == "ol":
            start = values.get("start", "")
            element.number = int(start) if start.isdecimal() else 1
        elif tag == "li":
            self.first_of_item = True
        elif tag == "pre":
            self.pre, self.language = True, _language(values)
        elif tag == "code" and self.pre:
            self.language = self.language or _language(values)
        self.open.append(element)

    def _end(self, element: _Open) -> str:
        tag = element.tag
        if tag in ("td", "th"):
            self._end_cell()
        elif tag == "tr":
            self._end_row(element)
        elif tag == "table":
            self._end_table(element)
        elif tag == "pre":
            self._end_code()
        elif tag in HEADINGS:
            self._end_block("#" * HEADINGS[tag] + " ")
        elif tag in BLOCKS:
            self._end_block()
            if tag == "li" and self.first_of_item:
                self.first_of_item = False  # an empty one
        else:
            self._end_inline(element)
        return tag

    def _end_inline(self, element: _Open) -> None:
        mark = "`" if element.tag in ("code", "kbd", "samp", "tt") and not self.pre else MARKS.get(element.tag)
        if (mark is None and element.href is None) or self.pre:
            return
        inner = "".join(self.text[element.begins :])
        if not (said := inner.strip()):
            return
        before, after = inner[: len(inner) - len(inner.lstrip())], inner[len(inner.rstrip()) :]
        if element.href is not None:
            said = f"[{said}]({element.href})"
        elif mark == "`":
            fence = "``" if "`" in said else "`"
            said = f"{fence} {said} {fence}" if "`" in said else f"`{said}`"
        else:
            said = f"{mark}{said}{mark}"
        self.text[element.begins :] = [before, said, after]

    def _close_implied(self, tag: str) -> None:
        for index in range(len(self.open) - 1, -1, -1):
            one = self.open[index]
            if tag in CLOSED_BY.get(one.tag, ()):
                while len(self.open) > index:
                    self._end(self.open.pop())
            elif one.tag in OWN_SCOPE.get(tag, ()) or one.tag == "table":
                return

    # Blocks

    def _end_block(self, mark: str = "") -> None:
        """What was read since the last block becomes one."""
        if not self.text:
            return
        text, in_row = "".join(self.text), self._row() is not None
        self.text.clear()
        if in_row and text.strip():  # inside a cell there are no blocks
            self.text.append(f"{text.strip()} ")
        for one in self.open:  # marks and links that reach over blocks begin anew
            one.begins = len(self.text)
        if in_row:
            return
        lines = [SPACES.sub(" ", line).strip() for line in text.split("  \n")]
        said = "  \n".join(line for line in lines if line)
        if said:
            self._add(mark + said)

    def _add(self, block: str) -> None:
        """A block with what stands before its lines: the indentation of lists, the signs of quotes, the bullet."""
        lists = [one for one in self.open if one.tag in ("ul", "ol")]
        prefix = "".join({"blockquote": "> ", "ul": "  ", "ol": "   "}.get(one.tag, "") for one in self.open)
        first = prefix
        if lists and self.first_of_item:
            bullet = f"{lists[-1].number}. " if lists[-1].tag == "ol" else "- "
            first = prefix[: len(prefix) - len("   " if lists[-1].tag == "ol" else "  ")] + bullet
            lists[-1].number += 1
            self.first_of_item = False
            # The items of a list stand close together.
            separator = "\n" if self.blocks and re.match(r"[> ]*(-|\d+\.) ", self.blocks[-1].lstrip("\n")) else "\n\n"
        else:
            separator = "\n\n"
        if separator == "\n\n" and "> " in prefix and self.blocks and self.blocks[-1].lstrip("\n").startswith(">"):
            separator = f"\n{prefix.rstrip()}\n"
        lines = block.split("\n")
        self.blocks.append(separator + "\n".join([first + lines[0], *(prefix + line for line in lines[1:])]))

    def _end_code(self) -> None:
        code = "".join(self.text).strip("\n").rstrip()
        self.text.clear()
        self.pre = False
        if self._row() is not None:
            self.text.append(f"`{SPACES.sub(' ', code)}` " if code else "")
        elif code:
            longest = max((len(run) for run in re.findall(r"`{3,}", code)), default=2)
            fence = "`" * (longest + 1)
            self._add(f"{fence}{self.language}\n{code}\n{fence}")
        self.language = ""

    def _row(self) -> _Open | None:
        """The innermost row of a table that is being read."""
        return next((one for one in reversed(self.open) if one.tag == "tr"), None)

    def _end_cell(self) -> None:
        if (row := self._row()) is None:  # a cell without a row
            self._end_block()
            return
        row.cells.append(SPACES.sub(" ", "".join(self.text)).strip().replace("|", "\\|"))
        self.text.clear()

    def _end_row(self, row: _Open) -> None:
        if "".join(self.text).strip():  # outside of a cell
            row.cells.append(SPACES.sub(" ", "".join(self.text)).strip())
        self.text.clear()
        tables = [one for one in self.open if one.tag == "table"]
        if tables:
            tables[-1].rows.append(row.cells)
        else:
            self.text.append(" ".join(row.cells))
            self._end_block()

    def _end_table(self, table: _Open) -> None:
        self._end_block()
        rows = [row for row in table.rows if any(row)]
        if self._row() is not None:  # in a cell of another
            self.text += [f"{' '.join(row)} " for row in rows]
            return
        width = max(map(len, rows), default=0)
        if width < 2:  # a table for the layout
            for row in rows:
                self._add(row[0])
            return
        head, *body = [row + [""] * (width - len(row)) for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * width, *body)]
        self._add("\n".join(lines))

    def _complete(self, url: str) -> str:
        url = url.strip().replace(" ", "%20").replace(")", "%29").replace("(", "%28")
        try:
            return urljoin(self.base_url, url) if self.base_url else url
        except ValueError:  # such as http://[x
            return url


def _language(values: dict[str, str]) -> str:
    found = LANGUAGE.search(values.get("class", ""))
    return found[1] if found else ""


@dataclass(frozen=True)
class _Convert:
    base_url: str | None
    links: bool

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row | Drop]:
        for row in rows:
            url = row.get("url")
            base = url if isinstance(url, str) and url else self.base_url
            page = markdown_of(row["text"], base_url=base, links=self.links)
            if not page.markdown:
                yield Drop(NO_TEXT)
                continue
            title = {} if page.title is None or row.get("title") else {"title": page.title}
            yield {**row, "text": page.markdown, **title}
