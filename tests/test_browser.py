"""The page in a real browser: what it asks for, what it prints on the console, and whether everything has its size."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_samples import VARIANTS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


# Chromium reads from descriptor 3 and writes to 4, whatever numbers the pipes have
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp("chromium", ["chromium", *sys.argv[3:]])
"""


class Browser:
    """Chromium behind a pipe that speaks the DevTools protocol: messages of JSON, each ended by a zero byte."""

    def __init__(self, profile):
        from_us, to_them = os.pipe()
        from_them, to_us = os.pipe()
        self.log = (Path(profile) / "chromium.log").open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(from_us),
                str(to_us),
                *FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        os.close(from_us)
        os.close(to_us)
        self.write, self.read, self.buffer, self.count, self.session = to_them, from_them, b"", 0, None
        self.events = []

    def __enter__(self):
        try:
            return self._attach()
        except BaseException:
            self.__exit__()
            raise

    def _attach(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.write)
        os.close(self.read)
        self.log.close()

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, seconds):
        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "chromium does not answer"
            chunk = os.read(self.read, 1 << 20)
            assert chunk, "chromium has ended"
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        answer = json.loads(message)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def open(self, path, width, height=900, scheme="light", scale=1):
        """Load the file as a window of that width would, and forget the events of the page before."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next(60)
        self.script("Promise.all([...document.images].map(i => i.decode()))")

    def script(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self):
        urls = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self):
        said = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event for event in self.events if event["method"] in said]


# how many figures each page has
FIGURES = {
    "sample": 9,
    "headless": 8,
    "hostile": 9,
    "ablated_more": 14,
    "ablated_headless": 11,
    "hostile_ablations": 14,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    return {name: VARIANTS[name]().save(root / name) for name in FIGURES}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_page_opens_offline_and_fits(browser, pages, name, scheme, width):
    browser.open(pages[name], width, scheme=scheme)
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].absolute().as_uri()]
    assert browser.script("document.documentElement.scrollWidth") <= width
    images = browser.script("[...document.images].map(i => [i.naturalWidth, i.clientWidth, i.clientHeight, i.alt])")
    assert len(images) == FIGURES[name]
    for natural, wide, high, alt in images:
        assert natural > 0
        assert 330 <= wide <= 760
        assert high >= 180
        assert len(alt) > 20


@pytest.mark.parametrize("name", ["hostile", "ablated_more", "hostile_ablations"])
def test_nothing_sticks_out_on_a_phone(browser, pages, name):
    browser.open(pages[name], 390)
    out = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('pre')
             && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.script(out) == []


def test_dark_readers_get_dark_paper_and_dark_figures(browser, pages):
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(pages["sample"], 1440, scheme=scheme)
        paper = browser.script("getComputedStyle(document.body).backgroundColor")
        shown = browser.script("document.images[0].currentSrc")
        seen[scheme] = paper, shown
    assert seen["light"][0] == "rgb(255, 255, 255)"
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]


@pytest.mark.parametrize("name", ["hostile", "hostile_ablations"])
def test_hostile_names_stay_text(browser, pages, name):
    browser.open(pages[name], 1440)
    assert browser.script("document.scripts.length") == 0
    heading = browser.script("document.querySelector('h1').textContent")
    assert heading.startswith("<script>alert(1)</script> \"quoted\" 'n' &amp; {{ 7 * 7 }}")
    assert browser.script("document.querySelectorAll('style').length") == 1


def test_schedules_are_set_in_one_width_and_can_be_reached(browser, pages):
    browser.open(pages["ablated_more"], 1440)
    font = browser.script("getComputedStyle(document.querySelector('#schedules ~ .scroll tbody code')).fontFamily")
    assert "monospace" in font
    assert browser.script("document.querySelectorAll('#schedules ~ .scroll tbody tr').length") == 20
    broken = "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.hash)).map(a => a.hash)"
    assert browser.script(broken) == []


def test_the_checks_can_fail(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<div style='width:2000px'>x</div><img src='missing.png' alt=''><script>console.error('no')</script>"
    )
    browser.events.clear()
    browser.call("Page.navigate", url=bad.as_uri())
    while not any(event["method"] == "Page.loadEventFired" for event in browser.events):
        browser._next(60)
    assert browser.complaints()
    assert len(browser.requests()) == 2
    assert browser.script("document.documentElement.scrollWidth") >= 2000
    assert browser.script("document.images[0].naturalWidth") == 0
