#!/usr/bin/env python3
"""The chat page in a real Chromium, driven through chromedriver's HTTP interface.

usage: test_page.py URL [SCREENSHOT]    (the server is there already)
"""
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    def __init__(self, folder):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, text=True)
        late = threading.Timer(300, self.driver.kill)
        late.start()
        ports = (re.search(r"successfully on port (\d+)", line) for line in self.driver.stdout)
        self.base = f"http://127.0.0.1:{next(found for found in ports if found).group(1)}"
        late.cancel()
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,800",
                            "--disable-dev-shm-usage", f"--user-data-dir={folder}"]}
        until = time.monotonic() + 30
        while True:
            try:
                self.call("GET", "/status")
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self.base += "/session/" + self.call("POST", "/session", {
            "capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})["sessionId"]

    def call(self, method, path, body=None):
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"},
                                         method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(f"{path}: {e.read().decode()[:300]}") from None

    def run(self, script, *args):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, selector):
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{found[ELEMENT]}"

    def click(self, selector):
        self.call("POST", self.find(selector) + "/click")

    def type(self, selector, text):
        self.call("POST", self.find(selector) + "/value", {"text": text})

    def wait(self, script, what, seconds=60):
        until = time.monotonic() + seconds
        while not self.run("return " + script):
            if time.monotonic() > until:
                raise AssertionError("never: " + what)
            time.sleep(0.1)

    def screenshot(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("GET", "/screenshot")))

    def close(self):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()


IDLE = "!document.getElementById('send').hidden && document.querySelectorAll('article').length"


def ask(browser, text):
    browser.type("#question", text + "\ue007")  # Enter


def check(browser, url, picture):
    browser.call("POST", "/url", {"url": url})
    browser.wait("document.title.includes('Linnet') && document.title.length > 6", "the model's name")
    browser.run("document.getElementById('settings').open = true; for (const [id, v] of"
                " [['temperature', '0'], ['max_tokens', '40']]) { const e = document.getElementById(id);"
                " e.value = v; e.dispatchEvent(new Event('change')); }"
                " document.getElementById('settings').open = false;")

    # a question asked and answered, with the figures below
    ask(browser, "What is the capital of Japan?")
    browser.wait(IDLE + " === 2", "an answer")
    first = browser.run("return document.querySelector('.assistant .body').textContent")
    foot = browser.run("return document.querySelector('.assistant > .foot').textContent")
    assert first.strip(), "the answer is empty"
    assert "tokens" in foot and "context" in foot, foot
    if picture:
        browser.screenshot(picture)

    # the same again
    browser.click("#again")
    browser.wait(IDLE + " === 2", "the answer again")
    again = browser.run("return document.querySelector('.assistant .body').textContent")
    assert again == first, (first, again)

    # HTML stays text, in questions and in answers
    browser.run("const a = current.turns[1]; a.text = '<img src=x onerror=\"window.hit = 1\"> **b** `c`"
                " [l](javascript:alert(1))\\n\\n```\\n<script>window.hit = 1</script>\\n```'; show();")
    assert browser.run("return document.querySelectorAll('#talk img, #talk script, #talk a').length") == 0
    assert browser.run("return document.querySelector('.assistant strong').textContent") == "b"
    assert "<script>" in browser.run("return document.querySelector('.assistant pre').textContent")
    ask(browser, "<b onclick=window.hit=1>hi</b>")
    browser.wait(IDLE + " === 4", "a second answer")
    assert browser.run("return document.querySelectorAll('#talk b').length") == 0
    assert not browser.run("return window.hit")

    # stop pressed while the answer comes
    browser.run("const e = document.getElementById('max_tokens'); e.value = '';"
                " e.dispatchEvent(new Event('change'));")
    browser.click("#new")
    browser.run("const poll = setInterval(() => {"  # in the page: from here, the story could end before
                " if (!(document.querySelector('.assistant .body')?.textContent.length > 10)) return;"
                " clearInterval(poll); document.getElementById('stop').click(); }, 5);")
    ask(browser, "Write a very long story about a bird, and then another long one.")
    browser.wait(IDLE + " === 2", "the end after stop")
    assert "stopped" in browser.run("return document.querySelector('.assistant > .foot').textContent")

    # conversations are there after a reload
    browser.call("POST", "/refresh")
    browser.wait("document.querySelectorAll('#list li').length === 2", "two conversations")
    browser.run("document.querySelectorAll('#list .open')[1].click()")
    browser.wait("document.querySelectorAll('article').length === 4", "the first conversation")

    # a telephone: the menu opens and closes, by keyboard too
    browser.call("POST", "/window/rect", {"width": 400, "height": 800})
    assert browser.run("return getComputedStyle(document.getElementById('side')).visibility") == "hidden"
    browser.click("#menu")
    browser.wait("getComputedStyle(document.getElementById('side')).visibility === 'visible'", "the menu")
    browser.type("#new", "\ue00c")  # Escape
    browser.wait("getComputedStyle(document.getElementById('side')).visibility === 'hidden'", "no menu")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "too wide"


def main():
    url, picture = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(folder)
        try:
            check(browser, url, picture)
        finally:
            browser.close()
    print("the page works")


if __name__ == "__main__":
    main()
