"""Open the built pages in headless Chromium, at three widths, light and dark: `python docs/in_a_browser.py`.

Nothing may be cut, stick out of its column, be too pale to read or come from a network. Pages are opened in frames of
`browser/measure.html`, which compares widths and posts the problems to a server of this process; no package is needed.
`browser/planted.html` has one defect of each kind and is measured among them, so that a measurement which sees nothing
fails.

Exit status: 0 nothing found, 1 something, 4 not run, since there is no Chromium here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

DOCS = Path(__file__).resolve().parent
BUILT = DOCS / "_build" / "html"
BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
WIDTHS = (400, 1280, 1920)
THEMES = {"dark": 0, "light": 1}  # Chromium's numbers of them
PAGES = (
    "index.html",
    "benchmarks.html",
    "failures.html",
    "how-to/verify-your-own-scheme.html",
    "how-to/coming-from-nemo-megatron-torchtitan.html",
    "reference/vocab-parallel.html",
    "reference/schemes.html",
    "notebooks/03_dual_chunk_swap_and_packing.html",
)
REPORT, PLANTED, MEASURE = "report.html", "planted.html", "measure.html"  # pages that the server adds
ADDED = DOCS / "browser"
DEFECTS = {"cut", "out of its column", "too pale", "wider than the window", "from a network"}
LIMIT_S = 60.0
NOT_RUN = 4


class _Handler(SimpleHTTPRequestHandler):
    """Files of the built pages, the files of `extra`, and a place to post what was measured."""

    def __init__(self, *arguments: Any, extra: dict[str, str], results: Queue[Any]) -> None:
        self.extra, self.results = extra, results
        super().__init__(*arguments, directory=str(BUILT))

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        if name not in self.extra:
            super().do_GET()
            return
        body = self.extra[name].encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{self.guess_type(name)}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: requests are no news."""


def report() -> str:
    """The page of a verdict: the first mistake of `examples/mistakes.py`."""
    sys.path.insert(0, str(DOCS / "examples"))
    import mistakes

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_scheme.py").write_text(mistakes.DROPPED.source)
        command = [sys.executable, "-m", "shardproof", "verify", "my_scheme.py", "--html", REPORT]
        subprocess.run(command, cwd=folder, check=False, capture_output=True)
        return (Path(folder) / REPORT).read_text()


def measured(browser: str, theme: str, extra: dict[str, str]) -> list[dict[str, Any]]:
    """Each page at each width: what was found. Errors: RuntimeError if the browser does not answer, or errs."""
    results: Queue[Any] = Queue()
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, extra=extra, results=results)) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        switches += [f"--blink-settings=preferredColorScheme={THEMES[theme]}", "--remote-debugging-port=0"]
        address = f"http://127.0.0.1:{server.server_port}/{MEASURE}"
        # A session of its own: the command may be a shell script, whose end would leave the browser.
        command, quiet = [browser, *switches, address], subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            result = results.get(timeout=LIMIT_S)
        except Empty:
            raise RuntimeError(f"{browser} did not answer within {LIMIT_S:.0f} s") from None
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.shutdown()
    if "error" in result:
        raise RuntimeError(f"the measuring page failed: {result['error']}")
    if result["dark"] != (theme == "dark"):
        raise RuntimeError(f"{browser} did not take the {theme} theme")
    return result["rows"]


def of_row(row: dict[str, Any], theme: str) -> list[str]:
    """What is wrong with one view: its problems; of the planted page the defects that were not seen."""
    view = f"{row['page']} {row['width']} {theme}"
    if row["page"] != PLANTED:
        return [f"{view}: {kind}: {what}" for kind, what in row["problems"]]
    unseen = DEFECTS - {kind for kind, _ in row["problems"]}
    return [f"{view}: a planted defect is not seen: {kind}" for kind in sorted(unseen)]


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("pages in a browser: NOT RUN, no Chromium here; Debian has it as chromium-headless-shell")
        return NOT_RUN
    start = time.perf_counter()
    missing = [page for page in PAGES if not (BUILT / page).exists()]
    if missing:
        print(f"pages in a browser: {', '.join(missing)} not built; run make pages")
        return 1
    views = {"pages": [*PAGES, REPORT, PLANTED], "widths": WIDTHS}
    extra = {name: (ADDED / name).read_text() for name in (PLANTED, MEASURE)}
    extra |= {REPORT: report(), "pages.json": json.dumps(views)}
    problems = [
        problem for theme in THEMES for row in measured(browser, theme, extra) for problem in of_row(row, theme)
    ]
    print("\n".join(problems), end="\n" if problems else "")
    count = len(THEMES) * len(WIDTHS) * (len(PAGES) + 1)
    seconds = time.perf_counter() - start
    print(f"pages in a browser: {len(problems)} problems in {count} views of {len(PAGES) + 1} pages, {seconds:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
