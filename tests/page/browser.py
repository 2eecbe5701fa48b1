"""Chromium, driven: what tests of the page say of it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.server.servers import PATIENCE_S

SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
)


class Browser:
    """A tab. Waits are guards against waiting for ever; nothing is measured."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.hosts_seen: set[str] = set()
        self.expected: tuple[str, ...] = ()
        self._scripts: list[str] = []

    def reset(self) -> None:
        """Forget every origin's storage and take a desktop's window."""
        self.leave()
        for script in self._scripts:
            method = "Page.removeScriptToEvaluateOnNewDocument"
            self.driver.execute_cdp_cmd(method, {"identifier": script})
        self._scripts.clear()
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", _EVERYTHING)
        self.size(1400, 1000)
        self.media(scheme="light")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.hosts_seen = set()
        self.expected = ()

    def open(self, url: str) -> None:
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {**_EVERYTHING, "origin": url})
        self.driver.get(f"{url}/")

    def leave(self) -> None:
        self.driver.get("about:blank")

    def before_load(self, script: str) -> None:
        """Run this before the page's own, in every page until the next reset."""
        method = "Page.addScriptToEvaluateOnNewDocument"
        made = self.driver.execute_cdp_cmd(method, {"source": script})
        self._scripts.append(made["identifier"])

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    def media(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    # ---- looking

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        [found] = self.all(selector)
        return found

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        """Of the only element that fits, hidden or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def wait(self, is_so: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := is_so()):
            assert time.monotonic() < deadline, f"never: {self.text('body'):.2000}"
            time.sleep(0.02)
        return found

    def wait_for(self, selector: str) -> None:
        self.wait(lambda: self.all(selector))

    # ---- acting

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def type(self, text: str, selector: str | None = None) -> None:
        """Into an element, or where the focus is."""
        target = self.driver.switch_to.active_element if selector is None else self.find(selector)
        target.send_keys(text)

    def keys(self, *keys: str) -> None:
        """A chord: all but the last are held."""
        from selenium.webdriver.common.action_chains import ActionChains  # not in every environment

        chain = ActionChains(self.driver)
        for key in keys[:-1]:
            chain.key_down(key)
        chain.send_keys(keys[-1])
        for key in keys[:-1]:
            chain.key_up(key)
        chain.perform()

    # ---- what the page did

    def take_errors(self) -> list[str]:
        """Lines of the console, but for those that a test expects."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in lines if not any(part in line for part in self.expected)]

    def hosts(self) -> set[str]:
        """Of every request since the last reset."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                host = urlsplit(message["params"]["request"]["url"]).hostname
                self.hosts_seen |= {host} if host else set()
        return self.hosts_seen


_EVERYTHING = {"origin": "*", "storageTypes": "all"}


@contextmanager
def open_browser(chromium: str, chromedriver: str) -> Iterator[Browser]:
    from selenium import webdriver  # not in every environment

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
