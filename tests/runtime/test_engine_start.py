"""What is said while engines start."""

import pytest

from nemorl import GenerationConfig
from nemorl.runtime.engine_start import told


def test_a_line_before_and_one_after(capsys: pytest.CaptureFixture[str]):
    with told(GenerationConfig(backend="vllm", num_replicas=2, log_dir="runs/mine/logs")):
        assert capsys.readouterr().err == "starting 2 x vllm through Ray, whose logs are in runs/mine/logs …\n"
    assert capsys.readouterr().err == "ready after 0 s\n"
    with told(GenerationConfig(backend="vllm")):
        assert capsys.readouterr().err == "starting vllm in this process …\n"


def test_nothing_where_nothing_starts_or_nothing_shall_be_said(capsys: pytest.CaptureFixture[str]):
    with told(GenerationConfig()), told(GenerationConfig(backend="vllm"), quiet=True):
        pass
    assert capsys.readouterr().err == ""
