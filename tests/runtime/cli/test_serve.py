"""`nemorl serve`, and its settings."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

import nemorl
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.runtime.cli.settings import ServeConfig
from tests.examples import write_example_files

SERVE = [sys.executable, "-m", "nemorl.runtime.cli.main", "serve"]


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_model_is_served_until_a_signal(tmp_path, by):
    write_example_files(tmp_path)
    command = [*SERVE, "model", "--port", "0", "--audit", "audit.jsonl", "--name", "tiny"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        base_url, _, key = (re.split("[= ]", line.strip())[1] for line in lines[:3])
        assert lines[3] == "model 'tiny'; Ctrl-C ends\n"
        client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
        asked = [{"role": "user", "content": "1+1="}]
        options = {"model": "tiny", "messages": asked, "max_tokens": 3}
        first, second = (
            client.chat.completions.create(**options, seed=5, temperature=0.7) for _ in range(2)
        )
        assert first.choices[0].message == second.choices[0].message
        assert [model.id for model in client.models.list()] == ["tiny"]
        process.send_signal(by)
        assert process.wait(30) == 128 + by
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == [200, 200, 200]


@pytest.mark.slow
def test_an_agent_is_evaluated_as_its_prompts_are(tmp_path, monkeypatch):
    """The endpoint's answers are those of the engine to the same prompts and seed."""
    write_example_files(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(row, base_url, api_key):
        asked = {"model": "policy", "messages": row["prompt"]}
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            said = client.chat.completions.create(**asked).choices[0].message.content
        return float(said.strip() == row["answer"])

    options = {"max_new_tokens": 6, "chat": True, "max_rows": 10, "temperature": 1.0}
    plain = nemorl.evaluate("model", "questions.jsonl", "exact_match", **options)
    options |= {"environment_factory": run}
    agents = nemorl.evaluate("model", "questions.jsonl", **options)
    responses = [[each["response"] for each in found["answers"]] for found in (plain, agents)]
    assert responses[0] == responses[1] and len(set(responses[0])) > 1
    assert plain["accuracy"] == agents["accuracy"]


def test_keys_are_read_from_a_file(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"a: {{key: {'k' * 16}, role: chat}}\nb: {{key: {'l' * 16}, role: read}}\n")
    named, made = ServeConfig(keys=str(file)).read_keys()
    assert named == {"a": ("k" * 16, "chat"), "b": ("l" * 16, "read")} and not made
    named, made = ServeConfig().read_keys()
    assert named == {"chat": (made["chat"], "chat")} and len(made["chat"]) > 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {key: short, role: chat}", "keys: a must have a key of at least 16 characters"),
        (f"a: {{key: {'k' * 16}, role: king}}", "keys: a must have .* and a role, chat or read"),
        (f"a: {'k' * 16}", "keys: a must have"),
        (f"a: {{key: {'k' * 16}, role: train}}", "key: tml-…, role: train"),
        ("{}", "keys must be different keys, one or more"),
    ],
)
def test_wrong_keys_are_named_but_not_shown(tmp_path: Path, text, said):
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        ServeConfig(keys=str(tmp_path / "keys.yaml"), tinker="train" in text).read_keys()
    assert "kkk" not in str(raised.value) and "short" not in str(raised.value)


HOT = GenerationConfig(temperature=2.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 70_000}, "port must be from 0 to 65535"),
        ({"tls_key": __file__}, "must be given together"),
        ({"keys": "nowhere.yaml"}, "keys must be a file"),
        ({"tls_certificate": __file__, "tls_key": __file__}, "must be a certificate in PEM"),
        ({"dir": "elsewhere"}, "dir is for --tinker"),
        ({"parallel": ParallelPlan(tp=2)}, "parallel.tp is for --tinker"),
        ({"tinker": True, "generation": HOT}, "temperature is not used with --tinker"),
    ],
)
def test_settings_that_can_not_be(settings, said):
    with pytest.raises(ValueError, match=said):
        ServeConfig(**settings)
