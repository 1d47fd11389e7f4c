"""Agents and clients of others, each in an environment of its own, against the endpoint.

Their scripts are in tests/clients, the environments in NEMORL_CLIENTS, or the temporary folder.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemorl.parallel.config import ModelConfig
from nemorl.rollout.calls import EventLoop
from nemorl.rollout.collect import collect
from nemorl.rollout.config import GenerationConfig, RolloutConfig
from nemorl.rollout.context import before_calls
from nemorl.rollout.conversation import Limits, Prompts, examples_of, segments_of
from nemorl.rollout.generation import Completion, SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.rollout.wrapped import as_generation_backend
from nemorl.runtime.cli.inference import served
from nemorl.runtime.cli.settings import ServeConfig
from nemorl.runtime.serve.agents import led_by
from nemorl.runtime.serve.endpoint import Endpoint, Key
from nemorl.runtime.serve.session import Session, Unrecorded
from tests.examples import EXAMPLES
from tests.rollout.chats import TOKENIZER, Scripted, call
from tests.tiny_models import tiny_model

SCRIPTS = Path(__file__).parents[2] / "clients"
ENVIRONMENTS = Path(os.environ.get("NEMORL_CLIENTS", f"{tempfile.gettempdir()}/nemorl-clients"))
QUESTION = {"question": "What is 3 + 4?", "answer": "7"}


def python_of(script: str, *instead: str) -> Path:
    """An interpreter that has what a script depends on, or other packages instead."""
    block = re.search(r"# /// script\n(.*?)# ///\n", (SCRIPTS / script).read_text(), re.DOTALL)
    needed = [*instead] or tomllib.loads(block[1].replace("# ", ""))["dependencies"]
    folder = ENVIRONMENTS / "_".join((script.removesuffix(".py"), *instead))
    python, installed = folder / "bin" / "python", folder / "installed.json"
    if not installed.exists() or json.loads(installed.read_text()) != needed:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", *needed]
        result = subprocess.run(install, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"could not be installed: {result.stderr.splitlines()[-1]}")
        installed.write_text(json.dumps(needed))
    return python


class Apart(Scripted):
    """Makes a token of each character, as the tokenizer would not make them of "ab"."""

    async def sample(self, prompt, params):
        text = self.answer(self.tokenizer.decode(list(prompt)))
        ids = (*(self.tokenizer(each)["input_ids"][0] for each in text), TOKENIZER.eos_token_id)
        logprobs = tuple(-0.5 - place / 8 for place in range(len(ids)))
        said = {"text": text, "finish_reason": "stop", "tokenizer": self.tokenizer}
        return [Completion(token_ids=ids, logprobs=logprobs, **said)]


def calculating(text: str) -> str:
    """What the model says: calls of the tools that there are, then the result."""
    last = text.rpartition("<|im_start|>user\n")[2]
    if '"name": "' not in text:
        return "Grab 7 "
    if "Sure?" in last:
        return "  A cab: 7."
    if not re.match(r"<tool_response>|Observation:", last):
        adds = '"name": "add"' in text
        return "ab:\n" + (call("add", b=4, a=3) if adds else call("bash", command="expr 3 + 4"))
    if '"name": "final_answer"' in text:
        return call("final_answer", answer="7 ab")
    if "Use bash." in text:
        return call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; expr 3 + 4")
    return "Grab 7 "


def said_in(completion: Completion) -> list:
    """An answer as the scripts print it."""
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", completion.text, re.DOTALL)
    found = [[each["name"], each["arguments"]] for each in map(json.loads, calls)]
    return [before_calls(completion.text) if calls else completion.text, *found]


def conversation_of(script: str, engine, folder: Path, **row):
    """A script's conversation as an agent, and what it printed."""
    command = f"{python_of(script)} {SCRIPTS / script} | tee {folder / 'printed'}"
    (folder / "home").mkdir()
    agent = f"env HOME={folder / 'home'} bash -o pipefail -c '{command}'"
    environment = led_by(None, RolloutConfig(agent=agent))
    limits = Limits(timeout_s=600)
    prompts = Prompts([{**QUESTION, **row}], [[1]], tokenizer=TOKENIZER, limits=limits)
    rollouts = collect(engine, environment, prompts, SamplingParams(max_new_tokens=256), seed=1)
    (conversation,) = rollouts.conversations
    *said, reward = (folder / "printed").read_text().splitlines()
    assert conversation.outcome.reward == float(reward)
    return conversation, [*map(json.loads, said)]


def check_trained(conversation) -> None:
    """Trained on are the tokens that were sampled, each once, with their log-probabilities."""
    trained = [
        (token, logprob)
        for each in examples_of(conversation.turns)
        for token, logprob, own in zip(
            each.input_ids, each.generation_logprobs, each.loss_mask, strict=True
        )
        if own
    ]
    sampled = [turn.completion for turn in conversation.turns]
    pairs = [zip(each.token_ids, each.logprobs, strict=True) for each in sampled]
    assert sorted(trained) == sorted(pair for each in pairs for pair in each)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "row", "lengths"),
    [
        ("openai_sdk.py", {}, [2, 2]),  # two conversations
        ("anthropic_sdk.py", {}, [2]),
        ("openai_agents.py", {}, [3]),
        ("smolagents_tools.py", {}, [1, 1]),  # it rewrites its calls
        ("mini_swe.py", {}, [2]),
        ("verifiers_sums.py", {"client": "eval"}, [2]),
        ("verifiers_sums.py", {"client": "train"}, [1]),
    ],
)
def test_what_a_client_saw_is_trained_on(script, row, lengths, tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    row = {**row, "tokenizer": str(tmp_path / "tokenizer")}
    engine = as_generation_backend(Apart(calculating))
    conversation, said = conversation_of(script, engine, tmp_path, **row)
    assert said == [said_in(turn.completion) for turn in conversation.turns]
    assert conversation.outcome.reward == 1.0
    assert [len(each.turns) for each in segments_of(conversation.turns)] == lengths
    check_trained(conversation)


@pytest.mark.slow
def test_an_agent_goes_on_with_the_tokens_of_a_model(tmp_path):
    """A small model says what no tokenizer would write so, twice in two runs."""
    size = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id}
    model = tiny_model(scale=2.0, tied=False, max_position_embeddings=4096, **size)
    engine = TorchGenerationBackend(model=model, tokenizer=TOKENIZER)
    engine.setup(GenerationConfig())
    conversation, said = conversation_of("openai_agents.py", engine, tmp_path)
    assert said == [[turn.completion.text] for turn in conversation.turns]
    assert len(segments_of(conversation.turns)) == 1 < len(conversation.turns)
    check_trained(conversation)


@pytest.mark.slow
def test_inspect_measures_what_transformers_does(tmp_path):
    size = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id}
    made = tiny_model(scale=8.0, tied=False, max_position_embeddings=4096, **size)
    made.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    rows, expected = [], []
    for number in range(12):
        asked = [{"role": "user", "content": f"{number}+{number}="}]
        options = {"add_generation_prompt": True, "return_tensors": "pt"}
        prompt = tokenizer.apply_chat_template(asked, **options)
        said = model.generate(**prompt, do_sample=False, max_new_tokens=12)
        text = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        expected.append(text)
        target = text[-3:] if number % 3 else "never"
        rows.append({"question": asked[0]["content"], "answer": target})
    assert len(set(expected)) > 3
    path = str(tmp_path / "model")
    config = ServeConfig(model=ModelConfig(path=path), port=0, name="tiny")
    with served(config) as (endpoint, keys):
        found = subprocess.run(
            [python_of("inspect_sums.py"), SCRIPTS / "inspect_sums.py", "tiny", tmp_path, "12"],
            env={
                **os.environ,
                "OPENAI_BASE_URL": f"{endpoint.url}/v1",
                "OPENAI_API_KEY": keys["chat"],
            },
            input=json.dumps(rows),
            capture_output=True,
            text=True,
            check=True,
        )
    answers, accuracy = found.stdout.splitlines()[-2:]
    assert [each.strip() for each in json.loads(answers)] == [each.strip() for each in expected]
    assert float(accuracy) == 8 / 12


def obeying(text: str) -> str:
    """What a model says that does as verifiers' tests tell it."""
    system, *asked = text.split("<|im_start|>user\n")
    results = sum(each.startswith("<tool_response>") for each in asked)
    calls = {
        "back": (1, {"message": "hello world"}),
        "bump": (3, {}),
        "bash": (1, {"command": "printf 'hello world' > answer.txt"}),
    }
    for name in re.findall(r'"name": "([\w-]+)"', system):
        most, arguments = calls.get(name.rpartition("_")[2], (0, {}))
        if results < most:
            return call(name, **arguments)
    return [each for each in asked if not each.startswith("<tool_response>")][-1].split("<|im_end")[
        0
    ]


@pytest.mark.slow
def test_verifiers_own_tests_in_subprocesses_pass(tmp_path):
    python = python_of("verifiers_sums.py")
    download = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    fetched = subprocess.run([*download, "-d", tmp_path, "verifiers==0.4.0"], check=False)
    if fetched.returncode:
        pytest.skip("verifiers' sources could not be downloaded")
    with tarfile.open(tmp_path / "verifiers-0.4.0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    generator, key = as_generation_backend(Scripted(obeying)), "k" * 20
    policy = Unrecorded(generator=generator, params=SamplingParams(), longest=50_000)
    with closing(EventLoop()) as loop, closing(Endpoint()) as endpoint:

        async def session() -> Session:
            return Session(policy, TOKENIZER, model="openai/gpt-5.6-luna", free=True, most=100)

        endpoint.keys[key] = Key(name="verifiers", role="chat", session=loop.run(session()))
        others = "docker or podman or apptainer or prime or modal or e2b"
        chosen = ["-m", f"subprocess and not ({others})", "--deselect"]
        chosen += ["tests/v1/test_e2e.py::test_shared_tool_isolation"]  # a package not among them
        env = {**os.environ, "PRIME_API_KEY": key, "PRIME_INFERENCE_URL": f"{endpoint.url}/v1"}
        env |= {"HOME": str(tmp_path), "PATH": f"{python.parent}:{env['PATH']}", "PYTHONPATH": ""}
        command = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "tests/v1/test_e2e.py",
            *chosen,
        ]
        found = subprocess.run(
            command, cwd=tmp_path / "verifiers-0.4.0", env=env, capture_output=True, text=True
        )
    assert "5 passed, " in found.stdout and found.returncode == 0, found.stdout[-3000:]


@pytest.mark.slow
def test_an_agent_of_others_is_trained(tmp_path):
    """examples/agent.py, briefly: a small model calls no tool."""
    size = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id}
    tiny_model("llama", max_position_embeddings=4096, **size).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    python = python_of("openai_agents.py")
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    script = (
        "import runpy, sys; sys.path.append(sys.argv.pop(1)); del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, packages, EXAMPLES / "agent.py", tmp_path / "run"]
    found = subprocess.run(
        [*command, "--model", tmp_path / "model", "--steps", "1"], capture_output=True, text=True
    )
    assert "held-out accuracy: 0.00 -> 0.00 (seed 0)" in found.stdout, found.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "held_out.json").read_text()) == [0.0, 0.0]
