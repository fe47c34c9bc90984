""".ci/run: every stage that can run is run, and the summary has the outcome of each."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

CI = ROOT / ".ci"
STAGE = "#!/usr/bin/env bash\n# Says its name.\n{head}\n{body}\n"


@pytest.fixture
def tree(tmp_path):
    """Return a folder with the real .ci/run and stages that print their names and do nothing."""
    (tmp_path / ".ci/stages").mkdir(parents=True)
    shutil.copy(CI / "run", tmp_path / ".ci/run")
    (tmp_path / ".ci/install_packages").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / ".ci/install_packages").chmod(0o755)
    for path in (CI / "stages").iterdir():
        needs = "\n".join(re.findall("^# needs: .*", path.read_text(), re.MULTILINE))
        write(tmp_path, path.name, f"echo this is {path.name}", needs)
    return tmp_path


def write(tree, name, body, head=""):
    (tree / ".ci/stages" / name).write_text(STAGE.format(head=head, body=body))


def ci(tree, *arguments):
    environment = {**os.environ, "NCCLPY_CI_PYTHON": sys.executable, "NCCLPY_CI_LOGS": str(tree / "logs")}
    command = ["bash", tree / ".ci/run", *arguments]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, cwd="/"
    )
    table = dict(re.findall(r"^(\w+) +(\S.*?) +\d+ s$", done.stdout.partition("=== summary")[2], re.MULTILINE))
    return done, table


def test_landing_set_passes_and_logs_each_stage(tree):
    done, table = ci(tree)
    assert done.returncode == 0 and done.stdout.endswith("\nall passed\n"), done.stdout + done.stderr
    assert {"install", "tests", "lint", "oldest", "fuzz"} <= table.keys() and "wheel" not in table
    assert set(table.values()) == {"passed"}
    assert all((tree / f"logs/{name}.log").read_text() == f"this is {name}\n" for name in table)
    assert all(f"this is {name}\n" in done.stdout for name in table)


def test_full_set_has_all_stages(tree):
    done, table = ci(tree, "full")
    assert done.returncode == 0
    assert table.keys() == {path.name for path in (CI / "stages").iterdir()}


def test_failure_hides_no_other_stage(tree):
    write(tree, "tests", "set -e\nfalse\necho went on", "# needs: install")
    write(tree, "lint", "exit 3")
    write(tree, "fuzz", "true", "# uses: no-such-command")
    done, table = ci(tree)
    assert done.returncode == 1 and "went on" not in done.stdout
    bad = {"tests": "FAILED", "lint": "FAILED", "fuzz": "not run: there is no no-such-command"}
    assert bad.items() <= table.items()
    assert {name for name, words in table.items() if words != "passed"} == bad.keys()
    assert done.stdout.splitlines()[-1] == f"3 of {len(table)} stages failed: tests lint fuzz"


def test_stage_without_its_needs_is_not_run(tree):
    write(tree, "install", "exit 1")
    done, table = ci(tree, "types", "lint")
    assert done.returncode == 1 and "this is types" not in done.stdout
    assert table == {"install": "FAILED", "lint": "passed", "types": "not run: install did not pass"}
    assert done.stdout.splitlines()[-1] == "2 of 3 stages failed: install types"


def test_unknown_stage_is_refused(tree):
    done, _ = ci(tree, "install", "nothing")
    assert done.returncode == 2 and "no stage is called nothing" in done.stderr


def test_workflow_runs_every_landing_stage():
    listed = subprocess.run([CI / "run", "--list"], capture_output=True, text=True, timeout=60, check=True).stdout
    landing = set(re.findall(r"^(\w+) +landing, full ", listed, re.MULTILINE))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    run = {name for names in re.findall(r"stage: \[?(\w+(?:, \w+)*)[],]", workflow) for name in re.split(", ?", names)}
    assert run - {"python"} | {"install"} == landing  # every other stage but lint begins with install
