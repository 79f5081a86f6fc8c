"""Drive a Space in headless Chromium: start its `app.py`, open a page, collect what goes wrong in it."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hf_pipelines

SOURCE_ROOT = Path(hf_pipelines.__file__).parent.parent
CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_SECONDS = 120
# Launches as `closedloop space` does, on the port it is told; the folder of the app is not the working directory.
LAUNCH = """
import runpy, sys
app = runpy.run_path(sys.argv[1])
address = {"server_name": "127.0.0.1", "server_port": int(sys.argv[2]), "ssr_mode": False}
app["demo"].launch(**{**app.get("LAUNCH_KWARGS", {}), **address})
"""


@dataclass
class SpacePage:
    """An open Space.

    Args:
        page (`playwright.sync_api.Page`): The page.
        url (`str`): Its address.
        problems (`list[str]`): Errors of console and page, and requests to another machine, so far.
        running (`set`): Requests of gradio's events that are under way.
    """

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)
    running: set[Any] = field(default_factory=set)

    def settle(self, timeout: float = 30) -> float:
        """Wait until no event is running any more; returns the seconds that took."""
        start = time.perf_counter()
        quiet = 0
        while quiet < 3:  # a click takes a moment to become a request, and an answer to become a picture
            self.page.wait_for_timeout(60)
            quiet = 0 if self.running else quiet + 1
            if time.perf_counter() - start > timeout:
                raise TimeoutError(f"an event still runs after {timeout} seconds.")
        return time.perf_counter() - start

    def click(self, name: str, timeout: float = 30) -> float:
        """Click the visible button called `name` and wait for its events; returns seconds."""
        start = time.perf_counter()
        # a canvas is uploaded before the event itself starts
        with self.page.expect_request(lambda request: "/queue/join" in request.url or "/run/" in request.url):
            self.page.locator("button:visible").get_by_text(name, exact=True).first.click()
        self.settle(timeout)
        return time.perf_counter() - start

    def open_tab(self, name: str) -> None:
        """Open the tab called `name`."""
        self.page.get_by_role("tab", name=name).click()
        self.page.wait_for_timeout(200)

    def choose(self, label: str, choice: str) -> None:
        """Choose an entry of the visible dropdown with `label`."""
        self.page.get_by_label(label, exact=True).and_(self.page.locator(":visible")).first.click()
        self.page.get_by_role("option", name=choice, exact=True).click()
        self.settle()

    def fill_number(self, label: str, value: float) -> None:
        """Type a number into the visible slider or number field with `label`."""
        numbers = self.page.locator("input[type=number]:visible")
        entry = self.page.get_by_label(label, exact=True).and_(numbers).first
        entry.fill(str(value))
        entry.press("Enter")
        entry.blur()
        self.settle()

    def take_message(self) -> str:
        """Wait for a message, read it and close it."""
        toast = self.page.locator("[data-testid='toast-body']").first
        toast.wait_for(state="visible", timeout=15_000)
        text = toast.inner_text()
        toast.locator("button").first.click()
        toast.wait_for(state="detached", timeout=15_000)
        return text


@contextmanager
def running_space(app: Path, **environment: str) -> Iterator[str]:
    """Run a Space in a process of its own.

    Args:
        app (`Path`): Its `app.py`.
        environment (`str`): Further environment variables.

    Yields:
        `str`: the address it answers at.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE_ROOT),
        **environment,
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with log.open("w") as output:
            command = [sys.executable, "-c", LAUNCH, str(app), str(port)]
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=variables | {"GRADIO_TEMP_DIR": str(Path(folder) / "gradio")},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_until_it_answers(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def open_space(app: Path, width: int = 1440, height: int = 1200, **environment: str) -> Iterator[SpacePage]:
    """Run a Space and open it in Chromium; both end with the block.

    Args:
        app (`Path`): Its `app.py`.
        width (`int`, defaults to 1440): Width of the window in pixels.
        height (`int`, defaults to 1200): Height of the window in pixels.
        environment (`str`): Further environment variables of the Space.

    Yields:
        [`SpacePage`]: the open page.
    """
    from playwright.sync_api import sync_playwright

    with (
        running_space(app, **environment) as url,
        tempfile.TemporaryDirectory() as profile,
        sync_playwright() as playwright,
    ):
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            args=list(FLAGS),
            viewport={"width": width, "height": height},
        )
        try:
            space = SpacePage(context.pages[0] if context.pages else context.new_page(), url)
            _collect_problems(space)
            space.page.goto(url, wait_until="load")
            space.page.locator("button:visible").first.wait_for(timeout=60_000)
            space.page.wait_for_timeout(1000)  # until the events of the page's own start are under way
            space.settle()
            yield space
        finally:
            context.close()


def _collect_problems(space: SpacePage) -> None:
    def note_console(message: Any) -> None:
        if message.type == "error":
            space.problems.append(f"console: {message.text} ({message.location.get('url', '')})")

    def note_request(request: Any) -> None:
        if not request.url.startswith((space.url, "data:", "blob:")):
            space.problems.append(f"request to another machine: {request.url}")

    def note_start(request: Any) -> None:
        # an event joins the queue and its answer is a stream that ends; one past the queue is a plain request
        if any(path in request.url for path in ("/queue/join", "/queue/data", "/run/", "/upload")):
            space.running.add(request)

    def note_end(request: Any) -> None:
        space.running.discard(request)

    space.page.on("request", note_start)
    space.page.on("requestfinished", note_end)
    space.page.on("requestfailed", note_end)
    space.page.on("console", note_console)
    space.page.on("pageerror", lambda error: space.problems.append(f"page: {error}"))
    space.page.on("request", note_request)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_it_answers(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the Space ended with exit status {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/config", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise TimeoutError(f"the Space did not answer within {START_SECONDS} seconds:\n{log.read_text()[-4000:]}")
