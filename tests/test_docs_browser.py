"""The manual in a real browser: its search works from a disk, its menu switches between versions. Needs chromium."""

import importlib
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium"),
]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manual of this version, and that of an older one beside it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs" / "versions.py"), "--site", str(folder), "--version", "0.2"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shutil.copytree(folder / "0.2", folder / "0.1")
    sys.path.insert(0, str(ROOT / "docs"))
    importlib.import_module("versions").write_index(folder)
    return folder


def shown(url: str) -> str:
    """The page as the browser has it after its scripts have run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000", "--dump-dom"]
    return subprocess.run([str(CHROMIUM), *flags, url], capture_output=True, text=True, timeout=240, check=True).stdout


def test_search_from_a_disk_finds_pages(site: Path) -> None:
    page = shown(f"{(site / '0.2' / 'index.html').as_uri()}?q=staleness")
    found = re.search(r'md-search-result__meta">\s*(\d+) matching documents', page)
    assert found is not None, "the search did not answer"
    assert int(found[1]) >= 3
    assert "concepts.html" in page


def test_menu_lists_versions_and_formulas_are_typeset(site: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = shown(f"http://127.0.0.1:{server.server_port}/0.2/algorithms/posttrain.html")
    finally:
        server.shutdown()
        server.server_close()
    assert re.findall(r'class="md-version__link">\s*([\d.]+)', page) == ["0.2", "0.1"]
    assert page.count('display="block"') >= 13
