"""Properties of the process that runs tests' programs in forks."""

from __future__ import annotations

import os
import types

import warm_ranks

import testing


def test_program_that_ends_before_its_number_is_read_is_not_waited_for(tmp_path, monkeypatch):
    process, noted = warm_ranks._started(), tmp_path / "pid"

    def flush():
        process.stdin.flush()
        testing.wait_for(lambda: noted.exists() and noted.read_text(), "the program's number")
        testing.wait_for(lambda: not os.path.exists(f"/proc/{noted.read_text()}"), "the end of the program")

    stdin = types.SimpleNamespace(write=process.stdin.write, flush=flush)
    late = types.SimpleNamespace(stdin=stdin, stdout=process.stdout)
    monkeypatch.setattr(warm_ranks, "_started", lambda: late)
    code = f"import os\nprint('done')\nopen({str(noted)!r}, 'w').write(str(os.getpid()))"
    assert warm_ranks.run_snippet(code, dict(os.environ), 5) == (0, "done\n", "")
