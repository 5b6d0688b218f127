"""A report's numbers are seen on a narrow screen without moving them. (Where there is a browser to ask.)"""

from __future__ import annotations

import re
import subprocess
from html import escape
from pathlib import Path

import pytest

from tests.reports.synthetic import write_experiment
from treetune.reports.html import write_report
from treetune.testing.browser import CHROMIUM

ASK = """<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const cells = page.querySelectorAll(".cards td").length;
  const cut = [...page.querySelectorAll(".cards, h1, h2, .facts, .legend, figcaption")].filter(
    (one) => one.getBoundingClientRect().right > 420 || one.scrollWidth > one.clientWidth + 1);
  document.title = `${cells > 5} cut off: ` + cut.map((one) => one.innerText.slice(0, 40)).join(" / ");
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser here")
def test_a_report_can_be_read_at_420_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a_long_name_without_any_place_where_it_could_be_broken_into_lines"
    write_experiment(path)
    report = write_report([path]).read_text()
    page = tmp_path / "page.html"
    # A window of Chromium is never narrower than about 500 pixels; a frame is.
    frame = f'<iframe style="width: 420px; height: 3000px; border: 0" srcdoc="{escape(report)}"></iframe>'
    page.write_text(f"<!doctype html><title></title>{ASK}{frame}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)[:1]
    assert title == "true cut off: "
