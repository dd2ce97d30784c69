"""Formulas of the manual as MathML: made when the site is built, so that no script and no network shows them.

A hook of MkDocs. As on GitHub a block of language `math` holds LaTeX, and so does a span between `` $` `` and `` `$ ``.
"""

import re
from typing import Any

from latex2mathml.converter import convert

_BLOCK = re.compile(r"^```math\n(?P<latex>.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"\$`(?P<latex>[^`\n]+)`\$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its formulas as MathML."""
    markdown = _BLOCK.sub(lambda match: f'<div class="formula">{rendered(match["latex"], "block")}</div>', markdown)
    return _SPAN.sub(lambda match: rendered(match["latex"], "inline"), markdown)


def rendered(latex: str, display: str) -> str:
    """One formula; lines that end in `\\\\` stand below each other."""
    return convert(" ".join(latex.split()), display=display)
