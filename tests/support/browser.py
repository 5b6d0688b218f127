"""Chromium, driven: pages are opened, errors of the console and requests that leave the machine are kept."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "chromium and chromium-driver (Debian's packages) are not installed"


REQUEST = "Network.requestWillBeSent"


class Browser:
    """One window. `script` runs JavaScript in the page and returns what it returns."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, *, width: int = 1400, dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        theme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", theme)
        self.driver.get(address)

    def script(self, text: str, *values: Any) -> Any:
        return self.driver.execute_script(text, *values)

    def wait(self, condition: str, *, seconds: float = 60) -> None:
        """Until a JavaScript expression is true. Raises TimeoutException, which says what the page shows."""
        from selenium.webdriver.support.ui import WebDriverWait

        def said(_: Any) -> bool:
            return bool(self.script(f"return ({condition})"))

        WebDriverWait(self.driver, seconds).until(said, f"never true: {condition}\n{self.text()[:2000]}")

    def text(self) -> str:
        return self.script("return document.body.innerText")

    def press(self, keys: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.TAG_NAME, "body").send_keys(keys)

    def click(self, selector: str) -> None:
        """On the first element of that selector, as a pointer does."""
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def type(self, keys: str) -> None:
        """To whatever has the focus, as a keyboard does."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def picture(self, path: Path) -> None:
        """The whole page, as high as it is."""
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def faults(self) -> list[str]:
        """Since last asked: errors and warnings of the console, and requests to other machines."""
        asked = [address for address in self.requests() if urlsplit(address).hostname != "127.0.0.1"]
        return self.messages() + [f"a request leaves the machine: {address}" for address in asked]

    def messages(self) -> list[str]:
        """Since last asked: errors and warnings of the console."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def requests(self) -> list[str]:
        """Since last asked: addresses that were asked for, but those that stand in the page itself."""
        logged = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in logged if one["method"] == REQUEST]
        return [address for address in sent if urlsplit(address).scheme not in ("data", "blob", "about")]


@contextmanager
def browser() -> Iterator[Browser]:
    """A new one, with a profile of its own that is deleted at the end."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(word)
    # What Chromium itself would ask its maker for is no request of the page.
    for word in (
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--disable-sync",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(30)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
