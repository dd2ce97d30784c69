"""A real `palestra view` and a headless Chromium in front of it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT = 90.0  # seconds; a shared machine may be slow


@contextmanager
def served(*folders: Path, **environment: str) -> Iterator[str]:
    """The address of a server over some folders."""
    command = [sys.executable, "-m", "palestra", "view", *map(str, folders), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        assert process.stdout is not None
        try:
            address = next(line.strip() for line in process.stdout if line.startswith("http"))
            yield address.rstrip("/")
        finally:
            process.terminate()


class Browser:
    """One tab."""

    def __init__(self, driver: Any):
        self.driver = driver
        self.address = ""

    def open(self, page: str) -> None:
        """A page of the server by its hash, loaded anew."""
        self.driver.get("about:blank")
        self.errors()
        self.driver.get(f"{self.address}/{page}")

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *args)

    def wait(self, condition: str, *args: Any) -> Any:
        """What an expression gives once it is true."""
        end = time.monotonic() + WAIT
        while not (value := self.run(f"return {condition}", *args)):
            if time.monotonic() > end:
                text = self.run("return document.body.innerText")
                raise AssertionError(f"{condition} never came true. Console: {self.errors()}. The page says:\n{text}")
            time.sleep(0.05)
        return value

    def has(self, text: str) -> None:
        """Wait for a text anywhere on the page."""
        self.wait("document.body.innerText.includes(arguments[0])", text)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of a selector that has a text, once it is there."""
        find = "[...document.querySelectorAll(arguments[0])].find((one) => one.textContent.includes(arguments[1]))"
        self.wait(f"!!{find}", selector, text)
        self.run(f"{find}.click()", selector, text)

    def keys(self, *keys: str) -> None:
        """Press keys, as of the keyboard, where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def errors(self) -> list[str]:
        """What the console has complained of since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module", name="address")
def address_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the fixture `folder` of a module of tests."""
    with served(folder, PALESTRA_CACHE=str(tmp_path_factory.mktemp("cache"))) as address:
        yield address


@pytest.fixture(name="page")
def page_of(browser: Browser, address: str) -> Iterator[Browser]:
    """A tab of that server; no test may leave an error in its console."""
    browser.address = address
    browser.open("")
    browser.run("localStorage.clear()")
    yield browser
    assert browser.errors() == []


def runs_of(folder: Path, name: str) -> list[str]:
    """Runs of a name, oldest first."""
    return [f"{name}/{path.name}" for path in sorted((folder / name).iterdir()) if path.is_dir()]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium; skips where it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: install palestra[dev]")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(chromium)
    finally:
        chromium.quit()
