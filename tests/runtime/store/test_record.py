import os
import time
from dataclasses import replace

import psutil
import pytest

from nemorl.runtime.store.directory import RunDirectory, RunRecord
from tests.runtime.runs import grpo_config, start


def test_a_whole_run_and_its_continuation(tmp_path):
    start(grpo_config(tmp_path / "run", steps=2))
    first = RunRecord.read(RunDirectory.open(tmp_path / "run"))
    start(grpo_config(tmp_path / "run", steps=3, run={"resume": True}))
    second = RunRecord.read(RunDirectory.open(tmp_path / "run"))
    assert (first.status, first.algorithm, first.total_steps) == ("finished", "grpo", 2)
    assert (second.run_id, second.total_steps, len(second.sessions)) == (first.run_id, 3, 2)
    assert second.sessions[0] < first.ended < second.sessions[1] < second.ended


def test_what_failed_is_in_the_record(tmp_path):
    with pytest.raises(ValueError, match="max_num_steps must be at least 1"):
        start(replace(grpo_config(tmp_path / "run"), max_num_steps=0))
    assert not (tmp_path / "run").exists(), "what the configuration alone refuses leaves nothing"

    def broken(prompt, response):
        raise RuntimeError("no reward today")

    with pytest.raises(Exception, match="no reward today"):
        start(grpo_config(tmp_path / "run"), reward=broken)
    record = RunRecord.read(RunDirectory.open(tmp_path / "run"))
    assert record.status == "failed" and "no reward today" in record.error and record.ended


def test_a_killed_process_leaves_an_interrupted_run(directory):
    record = RunRecord.begin(directory, algorithm="sft")
    assert record.present_status == "running"
    gone = max(psutil.pids()) + 1000
    assert replace(record, pid=gone).present_status == "interrupted"
    assert replace(record, pid=gone, status="failed").present_status == "failed"
    assert replace(record, pid=gone, host="elsewhere").present_status == "running", (
        "nobody here can know"
    )
    another = replace(record, pid=os.getpid(), sessions=(time.time() - 10**7,))
    assert another.present_status == "interrupted", "another process has the number now"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"algorithm": "sft"}', "\x00"])
def test_a_damaged_record_is_none(directory, text):
    directory.record.write_text(text)
    assert RunRecord.read(directory) is None
