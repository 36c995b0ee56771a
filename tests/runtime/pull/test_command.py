"""The command runner that pip is run with, tried on small commands of our own."""

from __future__ import annotations

import os
import sys

import pytest

from palmette.runtime.loading.pull import _run


def environment(tmp_path):
    return {**os.environ, "TMPDIR": str(tmp_path)}


def test_it_gives_the_exit_status_and_what_was_written_to_standard_error(tmp_path):
    script = "import sys; print('hidden'); sys.stderr.write('ERROR: no\\n'); sys.exit(3)"
    assert _run([sys.executable, "-c", script], environment(tmp_path), lambda: None) == (
        3,
        "ERROR: no\n",
    )


def test_a_command_that_is_not_there_fails_in_words(tmp_path):
    status, said = _run(["/no/such/python"], environment(tmp_path), lambda: None)
    assert status != 0
    assert said == "cannot start '/no/such/python': No such file or directory"


def test_an_interruption_ends_the_command(tmp_path):
    pid_file = tmp_path / "pid"
    script = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )

    def look():
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run([sys.executable, "-c", script], environment(tmp_path), look)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
