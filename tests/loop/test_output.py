"""What a user reads, and what becomes of a training when nobody can."""

import os
import subprocess
import sys

import pytest

from megatron_t1.cli import main

TALKS = """
import sys
from megatron_t1.commands.run import say
for number in range(200):
    say("x" * 1000)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
def test_a_training_goes_on_when_its_output_cannot_be_written(tmp_path, output):
    """`t1 run | head`; a batch log in a home directory that is over its quota."""
    if output == "full disk":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", TALKS, str(tmp_path / "end")]
    done = subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(target)
    assert done.returncode == 0 and (tmp_path / "end").read_text() == "done"
    assert done.stderr.count("the output can't be written any more: No space left") == (output == "full disk")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", [["run"], ["slurm", "submit", "cluster=slurm"], ["train", "critic"]])
def test_links_in_a_circle_are_named(tmp_path, capsys, words):
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / one).symlink_to(tmp_path / other)
    assert main([*words, f"run.dir={tmp_path / 'a' / 'run'}"]) == 1
    said = capsys.readouterr().err
    assert "links lead in a circle" in said and f"where:  {tmp_path}" in said


STOPPED = """
import sys
from megatron_t1.commands.run import stoppable
from megatron_t1.loop.launcher import Stopped
def work():
    raise Stopped(15)
stoppable(work, stopped=lambda number: open(sys.argv[1], "w").write("queued again"))
"""


def test_a_job_whose_log_is_full_still_queues_itself_again(tmp_path):
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", STOPPED, str(tmp_path / "end")], stderr=full, timeout=60)
    assert (tmp_path / "end").read_text() == "queued again"
