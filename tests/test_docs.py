"""Run every Python example of the README and of docs/ on the host engine, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples():
    for page in PAGES:
        for number, match in enumerate(re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)):
            yield pytest.param(match[1], id=f"{page.name}-{number}")


@pytest.mark.parametrize("code", list(examples()))
def test_example_runs_and_prints_what_it_says(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=os.environ | {"NCCLPY_LIBRARY": "host"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # A comment behind a print says what it prints.
    promised = re.findall(r"^\s*print\(.*\)\s+# (.+)$", code, re.M)
    assert [line for line in promised if line not in done.stdout] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
