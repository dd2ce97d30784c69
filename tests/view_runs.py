"""Runs for the tests of the web view, and a client of its server."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from palestra.view.demo import make_demo
from palestra.view.places import Places
from palestra.view.server import create_app


class View:
    """The server over a folder, as its page sees it."""

    def __init__(self, root: Path, key: str | None = None):
        self.root = root
        self.client = TestClient(create_app(Places([root]), key=key), base_url="http://127.0.0.1:8765")

    def get(self, path: str, code: int = 200, /, **params: Any) -> Any:
        response = self.client.get(f"/api/{path}", params=params)
        assert response.status_code == code, response.text[:200]
        return response.json()

    def run(self, name: str) -> str:
        """The newest run of a name."""
        return next(row["run"] for row in self.get("runs")["runs"] if row["name"] == name)

    def session(self, name: str) -> Path:
        return next(iter(sorted((self.root / self.run(name) / "sessions").iterdir())))


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, made once for all files of tests; a test that changes it takes a copy."""
    folder = tmp_path_factory.getbasetemp() / "view_demo"
    if not folder.exists():
        make_demo(folder)
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
