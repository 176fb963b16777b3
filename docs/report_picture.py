"""Take the landing page's picture of a report page, light and dark: `python docs/report_picture.py`.

The report is the one of the landing page: its scheme, with its mistake. It needs Chromium.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import in_a_browser

from shardproof.report import themes

PICTURE = in_a_browser.DOCS / "images" / "report.png"
SIZE = "1000,660"  # down to the end of the transfers between the ranks


def wrong_scheme() -> str:
    """The landing page's scheme with the line that its diff changes."""
    text = (in_a_browser.DOCS / "index.md").read_text()
    source, difference = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("python", "diff"))
    old, new = (line[1:] for line in difference.splitlines())
    return source.replace(old, new)


def write(browser: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "row_parallel.py").write_text(wrong_scheme())
        command = [sys.executable, "-m", "shardproof", "verify", "row_parallel.py", "--html", "report.html"]
        subprocess.run(command, cwd=folder, check=False, capture_output=True)
        for theme, number in in_a_browser.THEMES.items():
            switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
            switches += [f"--blink-settings=preferredColorScheme={number}", f"--user-data-dir={folder}/{theme}"]
            switches += [f"--screenshot={themes.path_of(PICTURE, theme)}", f"{folder}/report.html"]
            subprocess.run([browser, *switches], check=True, capture_output=True)


if __name__ == "__main__":
    browser = next(filter(None, map(shutil.which, in_a_browser.BROWSERS)), None)
    if browser is None:
        sys.exit("no Chromium here; Debian has it as chromium-headless-shell")
    write(browser)
