"""A real browser without a window: Debian's chromium, driven by its own options."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


class Browser:
    """Opens pages in chromium; on failure of a check the picture of the page stays, and its path is in the message."""

    def __init__(self, folder: Path) -> None:
        found = next(filter(None, map(shutil.which, _NAMES)), None)
        if found is None:
            pytest.skip("there is no chromium here: apt-get install chromium")
        self._command = [found, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        self._command += ["--virtual-time-budget=10000", "--no-first-run", "--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            self._command.append("--no-sandbox")  # chromium refuses root otherwise
        self._folder = folder

    def close(self) -> None:
        """The profile is of no use afterwards, and large; pictures stay."""
        shutil.rmtree(self._folder / "profile", ignore_errors=True)

    def dom(self, page: str, width: int = 1280, dark: bool = False) -> str:
        """The document after its script has run."""
        return self._run(page, width, dark, "--dump-dom")

    def picture(self, page: str, width: int = 1280, dark: bool = False, height: int = 1600) -> Path:
        target = self._folder / f"page-{width}{'-dark' if dark else ''}.png"
        self._run(page, width, dark, f"--screenshot={target}", height=height)
        return target

    def told(self, page: str, script: str, width: int = 1280) -> list[str]:
        """What a script that runs after the page's own passes to `tell(...)`, as text."""
        wait = (
            "const told=[];const tell=(value)=>told.push(String(value));"
            "const wait=setInterval(()=>{if(!document.body.dataset.ready)return;clearInterval(wait);"
            f"tell(document.body.dataset.ready);{script};"
            "document.body.dataset.told=JSON.stringify(told)},20)"
        )
        page = _POLICY.sub("", page).replace("</body>", f"<script>{wait}</script></body>")
        found = re.search(r'<body[^>]* data-told="([^"]*)"', self.dom(page, width))
        assert found is not None, self.kept(page, "the script did not end", width)
        ready, *told = json.loads(html.unescape(found[1]))
        assert ready == "yes", self.kept(page, ready, width)
        return [str(value) for value in told]

    def kept(self, page: str, why: str, width: int = 1280) -> str:
        """For the message of an assertion that failed."""
        return f"{why}; a picture of the page: {self.picture(page, width)}"

    def _run(self, page: str, width: int, dark: bool, *options: str, height: int = 1600) -> str:
        file = self._folder / "page.html"
        file.write_text(page, encoding="ascii")
        look = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [*self._command, look, f"--window-size={width},{height}", *options, file.as_uri()]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout
