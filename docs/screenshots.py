"""Makes the pictures of the web view in docs/images: pages of the demo in headless Chromium, wide and on a phone."""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from palestra.view.demo import make_demo

IMAGES = Path(__file__).parent / "images"
FORMS = {"dark": (1440, 700, "dark"), "light": (1440, 700, "light"), "phone": (400, 860, "dark")}
# What the manual and the README show.
MANUAL = {("run", "dark"), ("rollouts", "dark"), ("timeline", "dark"), ("compare", "light"), ("pipeline", "light")}
READY = "document.querySelector('main')?.children.length && !document.querySelector('.loading')"


def pages(folder: Path) -> dict[str, str]:
    """Addresses by name, over the runs of the demo."""
    first, last = (f"demo_sums/{path.name}" for path in sorted((folder / "demo_sums").iterdir()) if path.is_dir())
    control = next(f"demo_cartpole/{path.name}" for path in (folder / "demo_cartpole").iterdir() if path.is_dir())
    store = next((folder / "demo_pipeline" / "outputs").glob("tokenize-*"))
    return {
        "runs": "#/",
        "run": f"#/run/{last}",
        "rollouts": f"#/rollouts/{last}?step=12&color=advantage",
        "compare": f"#/compare?runs={first},{last}",
        "timeline": f"#/timeline/{last}",
        "control": f"#/run/{control}",
        "spec": f"#/spec/{last}",
        "files": f"#/files/{last}",
        "search": "#/others?kind=searches",
        "pipeline": "#/others?kind=pipelines",
        "data": f"#/data?path={folder.name}/{store.relative_to(folder)}",
    }


def browser() -> Any:
    """Headless Chromium by selenium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "force-color-profile=srgb"):
        options.add_argument(f"--{argument}")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def shoot(driver: Any, address: str, path: Path, *, width: int, height: int, theme: str) -> None:
    """One picture of one page."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")
    driver.get(address)
    end = time.monotonic() + 60
    while not driver.execute_script(f"return {READY}") and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)  # canvases are drawn after the data is there
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


def main() -> None:
    """The pictures of the manual, or all pages in all forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures (default: docs/images)")
    parser.add_argument("--all", action="store_true", help="every page, dark, light and on a phone")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_demo(Path(folder))
        command = [sys.executable, "-m", "palestra", "view", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            base = next(line.strip() for line in server.stdout if line.startswith("http"))
            driver = browser()
            try:
                for name, address in pages(Path(folder)).items():
                    for form, (width, height, theme) in FORMS.items():
                        if args.all or (name, form) in MANUAL:
                            path = args.out / f"view_{name}_{form}.png"
                            shoot(driver, base + address, path, width=width, height=height, theme=theme)
            finally:
                driver.quit()
                server.terminate()


if __name__ == "__main__":
    main()
