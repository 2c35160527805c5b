"""A headless Chromium with a page in it: what it draws, says, and how wide it gets.

For the tests of the report and for `make pictures`.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT_S = 600.0
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
_QUIET = ("component-update", "background-networking", "sync", "quic", "gpu", "dev-shm-usage")

# The share of a canvas that is not blank.
_INKED = """
return [...document.querySelectorAll("[data-chart] canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let at = 3; at < pixels.length; at += 4) inked += pixels[at] > 0;
  return inked;
});
"""


@contextmanager
def chromium(folder: Path, theme: str = "light") -> Iterator["Browser"]:
    """Start a browser with a profile of its own; it looks for nothing outside of this machine."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless", "no-sandbox", "no-first-run", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    for what in _QUIET:
        options.add_argument(f"--disable-{what}")
    options.add_argument(f"--user-data-dir={folder}")
    dark = int(theme != "dark")
    options.add_argument(f"--blink-settings=preferredColorScheme={dark}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """What a reader of a page sees and does."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1400, height: int = 1000) -> None:
        """Open a page in a window of this size, and wait until its charts are drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)
        self.until("window.reportReady === true")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.driver.execute_script(f"return {script}")

    def until(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        WebDriverWait(self.driver, TIMEOUT_S, poll_frequency=0.05).until(lambda _: self.run(script))

    def inked(self) -> list[int]:
        """Return how many pixels of each chart are drawn."""
        inked: list[int] = self.driver.execute_script(_INKED)
        return inked

    def errors(self) -> list[str]:
        """Return what the console says since it was last asked."""
        logged = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in logged]

    def picture(self, file: Path) -> None:
        """Keep the whole page as a PNG."""
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("document.documentElement.clientWidth")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.save_screenshot(str(file))
