"""Builds the manual of this version into a site of several, among which a menu at the top of each page switches.

    python docs/versions.py [--site site] [--version 0.1]

The manual goes to SITE/VERSION; versions that are there already stay. `versions.json` lists them, the newest first, and
SITE/index.html leads to the newest. Any web server shows the folder: `python -m http.server --directory site`.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

from palestra import __version__

ROOT = Path(__file__).parent.parent
# The name of the tool whose layout the theme's menu reads. Nothing of the tool itself is used.
MENU = {"version": {"provider": "mike"}}
_HOME = '<!doctype html><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">The manual of {0}</a>\n'


def number(version: str) -> tuple[int, ...]:
    """What versions are ordered by: 0.10 is newer than 0.9."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def write_index(site: Path) -> list[str]:
    """Write `versions.json` and the home page for the versions that are there; returns them, the newest first."""
    there = sorted((path.parent.name for path in site.glob("*/index.html")), key=number, reverse=True)
    rows = [{"version": name, "title": name, "aliases": ["latest"] if name == there[0] else []} for name in there]
    (site / "versions.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (site / "index.html").write_text(_HOME.format(there[0]), encoding="utf-8")
    return there


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    parser.add_argument("--version", default=".".join(__version__.split(".")[:2]))
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]*\d[\w.-]*", given.version):
        parser.error(f"--version is the name of a folder with a number in it, such as 0.1; got {given.version!r}")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(given.site / given.version))
    config.extra.update(MENU)
    build(config)
    print(*write_index(given.site))
    return 0


if __name__ == "__main__":
    sys.exit(main())
