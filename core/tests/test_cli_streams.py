"""The command line with standard streams that are closed, full, or of another encoding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = "from headstock.cli.main import main; main()"


def shell(command, **variables):
    """Runs a command line in a shell, which does with its streams what Python cannot."""
    program = f"exec {sys.executable} -c '{START}'"
    environment = {**os.environ, "HEADSTOCK_PLUGINS": "", **variables}
    return subprocess.run(["bash", "-c", f"{program} {command}"], env=environment, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", ["--version", "plugins", "backends --json"])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing_else(command, closed):
    done = shell(f"{command} {closed}")
    whole = shell(command)
    assert done.returncode == 0
    assert done.stdout == (b"" if ">&-" in closed.split() else whole.stdout)
    assert done.stderr == (b"" if "2>&-" in closed else whole.stderr)


def test_closed_streams_leave_messages_and_exit_codes():
    done = shell("explain --model /no/such/model >&-")
    assert done.returncode == 2
    assert b"/no/such/model" in done.stderr
    done = shell("generate - <&-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input is empty" in done.stderr


@pytest.mark.parametrize("command", ["--version", "plugins --json", "backends --json"])
def test_output_that_finds_no_room_is_told_in_one_line(command):
    done = shell(f"{command} >/dev/full")
    assert done.returncode == 2
    assert done.stderr.decode().startswith("headstock: cannot write the output: No space left on device; would work:")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("encoding", ["latin-1", "iso8859-5"])
def test_text_that_an_encoding_lacks_is_replaced_and_the_rest_is_kept(encoding):
    whole, done = (shell("generate --help", PYTHONIOENCODING=each) for each in ("utf-8", encoding))
    assert done.returncode == 0
    assert done.stdout == whole.stdout.decode().encode(encoding, "replace") != whole.stdout
