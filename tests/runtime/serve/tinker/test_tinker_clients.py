"""Foreign code, unchanged, against `nemorl serve --tinker`: Tinker's SDK and its cookbook.

Their environments are those of tests/runtime/serve/test_clients.py.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.forked import succeeded
from tests.rollout.chats import TOKENIZER
from tests.runtime.serve.test_clients import SCRIPTS, python_of
from tests.test_demo import packages, smollm2  # noqa: F401
from tests.tiny_models import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NAME = "org/model"
OLD = "0.25.0", "0.30.4"


@contextmanager
def serving(folder: Path, *settings: str) -> Iterator[dict[str, str]]:
    """Serve the model folder/org/model; yield what its clients need in their environment."""
    command = [sys.executable, "-m", "nemorl", "serve", NAME, "--tinker", "--port", "0"]
    command += ["--dir", str(folder / "state"), *settings]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            found = dict(re.search(r"(\w+)=(\S+)", line).groups() for line in lines)
            yield found | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 128 + signal.SIGINT


@pytest.fixture(scope="module")
def sdk(tmp_path_factory) -> Iterator:
    """What a version of the SDK printed, by step."""
    folder = tmp_path_factory.mktemp("sdk")
    tiny_model(scale=4.0, max_position_embeddings=4096).save_pretrained(folder / NAME)
    tiny_tokenizer().save_pretrained(folder / NAME)
    with serving(folder) as variables:

        @cache
        def run(*instead: str) -> dict:
            given = {"base_model": NAME, "rank": 0, "loras": [4, 8]}
            command = [python_of("tinker_sdk.py", *instead), "-W", "ignore"]
            done = subprocess.run(
                [*command, SCRIPTS / "tinker_sdk.py"],
                cwd=folder,
                env={**os.environ, **variables},
                input=json.dumps(given),
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
            steps = defaultdict(list)
            for line in map(json.loads, done.stdout.splitlines()):
                measured = line.get("metrics", {})
                line["metrics"] = {k: measured[k] for k in ("grad_norm",) if k in measured}
                steps[line.pop("step")].append(line)
            return {name: found[0] if len(found) == 1 else found for name, found in steps.items()}

        run.folder, run.variables = folder, variables
        yield run


ROW = [5, 9, 13, 9, 5, 20, 31, 7, 11, 2, 40, 8]
SIZES = 11, 6, 8
"""Of the script's rows, in targets."""


def between(low: float, high: float) -> list[torch.Tensor]:
    return [torch.linspace(low, high, size) for size in SIZES]


def policy_loss(name: str, now: torch.Tensor, before: torch.Tensor, a: torch.Tensor):
    r = (now - before).exp()
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        return -torch.minimum(r * a, r.clamp(0.7, 1.4) * a).sum()
    if name == "cispo":
        return -(r.clamp(0.0, 1.1).detach() * a * now).sum()
    assert name == "dro"
    return -(a * now - 0.025 * (now - before) ** 2).sum()


def test_training_is_as_in_torch(sdk):
    """Losses, log-probabilities, gradient norms and AdamW of a whole model, written anew."""
    found, model = sdk(), AutoModelForCausalLM.from_pretrained(sdk.folder / NAME)
    parts = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])  # vectors do not decay
    for place, name in enumerate(("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")):
        logprobs = []
        for size in SIZES:
            logits = model(torch.tensor([ROW[:size]])).logits[0].log_softmax(-1)
            logprobs.append(logits.gather(-1, torch.tensor(ROW[1 : size + 1])[:, None])[:, 0])
        if name == "cross_entropy":
            pairs = zip(logprobs, between(0.0, 2.0), strict=True)
            losses = [-(now * weights).sum() for now, weights in pairs]
        else:
            given = zip(logprobs, between(-4.0, -3.0), between(-1.0, 1.5), strict=True)
            losses = [policy_loss(name, *each) for each in given]
        optimizer.zero_grad()
        sum(losses).backward()
        clipped = place % 2
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if clipped else torch.inf)
        settings = [(1e-2, (0.8, 0.9), 1e-8, 0.1), (5e-3, (0.9, 0.95), 1e-12, 0.0)][clipped]
        for group, decays in zip(optimizer.param_groups, (1, 0), strict=True):
            group["lr"], group["betas"], group["eps"], decay = settings
            group["weight_decay"] = decay * decays
        optimizer.step()
        step = found[name]
        assert step["loss"] == pytest.approx(sum(losses).item(), rel=1e-4), name
        assert step["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3), name
        for mine, theirs in zip(logprobs, step["logprobs"], strict=True):
            assert theirs == pytest.approx(mine.tolist(), abs=1e-3), name


def test_losses_and_states_fit_together(sdk):
    found = sdk()
    assert found["capabilities"]["models"] == [NAME]
    assert found["forward"]["loss"] == pytest.approx(-sum(map(sum, found["forward"]["logprobs"])))
    many = found["many"]
    assert many["loss"] == pytest.approx(many["one"] * many["count"]) and many["distinct"] == 1
    # ∂/∂logprob of (logprob + 2)² through a second pass
    custom = [x for row in found["custom"]["logprobs"] for x in row]
    assert found["custom"]["loss"] == pytest.approx(sum((x + 2) ** 2 for x in custom))
    assert found["custom"]["seen"] == 3.0 and found["custom"]["metrics"]["grad_norm"] > 0
    pairs = zip(found["traced"]["logprobs"], between(0.0, 2.0), strict=True)
    expected = sum((weights * torch.tensor(row) ** 2).sum().item() for row, weights in pairs)
    assert found["traced"]["loss"] == pytest.approx(expected)
    soft = found["soft targets"]
    expected = -sum(0.75 * a + 0.25 * b for a, b in soft["logprobs"][0])
    assert soft["loss"] == pytest.approx(expected)
    sparse = found["sparse weights"]
    expected = -sum(0.75 * a + 0.25 * b for a, b in sparse["logprobs"][0][::2])
    assert sparse["loss"] == pytest.approx(expected)
    original, alone, full = (
        found[f"continued: {name}"] for name in ("original", "weights alone", "with optimizer")
    )
    assert original == full and original["first"] == alone["first"] != original["after"]
    assert alone["after"] != original["after"]
    assert found["load_state"] == found["goes on"]
    for rank in (4, 8):
        first, second = (found[f"lora {rank}, turn {turn}"] for turn in range(2))
        assert first["loss"] == found["cross_entropy"]["loss"] > second["loss"] > 0
    assert found["lora 4, turn 1"] != found["lora 8, turn 1"]


def test_samples_fit_together(sdk):
    found = sdk()
    ((tokens, logprobs, reason),) = found["greedy"]["said"]
    assert len(tokens) == 8 and reason == "length"
    for name in ("greedy by path", "copy", "copy by handle"):
        assert found[name] == found["greedy"]
    assert found["greedy"] != found["greedy of the base"]
    end = tokens.index(tokens[2]) + 1
    assert found["stop id"]["said"] == [[tokens[:end], logprobs[:end], "stop"]]
    for name in ("stop text", "stop texts"):
        assert found[name]["said"] == [[tokens[:3], logprobs[:3], "stop"]]
    first, again = found["seed 1"]
    assert first == again != found["seed 2"]
    assert len({tuple(each[0]) for each in first["said"]}) == 3
    for each in (*found["top_k 1"], found["top_p"]):
        assert each["said"][0][0] == tokens
    assert found["unasked"]["found"] == [None, None] and found["zero weights"]["loss"] == 0
    assert found["hot"]["said"][0][0] != tokens
    prompt, top = found["prompt"]["logprobs"], found["prompt"]["top"]
    now = found["continued: original"]["after"]
    assert found["computed"]["logprobs"] == prompt and prompt[0] is None is top[0]
    assert prompt[1:] == pytest.approx(now["logprobs"][0][:5], abs=1e-5)
    assert [len(each) for each in top[1:]] == [3] * 5
    assert all(each == sorted(each, key=lambda pair: -pair[1]) for each in top[1:])
    assert [each[0][1] for each in found["top sampled"]["top"]] == pytest.approx(logprobs, abs=1e-5)
    assert found["top sampled"]["ids"] == 3
    scores, asked = found["targets"]["found"], found["targets"]["asked"]
    assert asked[0][0] == ROW[1] and scores[0][0] == prompt[1] and scores[3][0] == scores[3][1]
    assert [scores[i][j] for i, j in ((0, 1), (2, 0), (4, 1))] == [0.0] * 3  # where -1 was asked
    sparse = found["sparse targets"]
    assert sparse["data"] == [scores[1][1], scores[4][0]] and sparse["shape"] == [5, 2]
    assert sparse["sparse_crow_indices"] == [0, 0, 1, 1, 1, 2]
    assert found["last two"]["logprobs"] == [None] * 4 + prompt[4:]
    drawn = found["alternatives"]
    assert [len(each) for each in drawn["tokens"]] == [4] * 5
    likeliest = dict(map(tuple, top[1]))
    both = zip(drawn["tokens"][0], drawn["logprobs"][0], strict=True)
    assert all(likeliest.get(id, x) == pytest.approx(x) for id, x in both)
    assert found["tokenizers"]["written"] == [tiny_tokenizer().encode("1+1=")] * 3


def test_lists_and_deletions_fit_together(sdk):
    found = sdk()
    assert found["checkpoints"] == {
        "of_run": ["sampler_weights/one", "weights/one"],
        "page": 1,
        "metrics": {},
    }
    assert [each["left"] for each in found["deleted"]] == [["sampler_weights/one"], []]
    assert found["session"] == {"runs": 7, "metadata": {"of": "the test"}} | {"metrics": {}}
    assert found["expiry"]["set"] == [True, True] and found["by path"]["same"]


REFUSED = {
    "unknown loss": "loss_fn must be one of cross_entropy",
    "unknown setting": "loss_fn_config .* but has 'beta'",
    "setting of none": "loss_fn_config .* but has 'beta'",
    "image prompt": "prompt",
    "no advantages": r"data.0.loss_fn_inputs.\w+ must be given with ppo",
    "nan weights": "weights must be finite",
    "token outside": "must be token ids below 42",
    "short targets": r"target_tokens must be \[5\]",
    "image": "no images",
    "no gradients": "needs a gradient",
    "negative rate": "learning_rate",
    "path trick": "path must be letters",
    "other model": "must be 'org/model'",
    "unknown state": "path must be tinker://MODEL/weights/NAME",
    "temperature": "temperature must be at least 0",
    "top_p": "top_p must be above 0",
    "no kind": "unknown",
    "deleted": "there is no saved state",
    "deleted weights": "there is no saved state",
}


@pytest.mark.parametrize(("what", "words"), REFUSED.items())
def test_the_sdk_is_told_what_is_wrong(sdk, what, words):
    kind, status, message = sdk()[f"refused: {what}"]["error"]
    assert re.search(words, message), message
    if status == "user":
        assert kind == "RequestFailedError"
    else:
        assert 400 <= status < 500


@pytest.mark.parametrize("version", OLD)
def test_older_sdks_see_the_same_numbers(sdk, version):
    old, new = sdk(f"tinker=={version}"), sdk()
    compared = [name for name in old if "refused" not in name and "error" not in old[name]]
    assert len(compared) > 40
    for name in compared:
        assert old[name] == new[name], name
    refused = [name for name in new if name.startswith("refused")]
    for name in refused:
        assert old[name]["error"][:2] == new[name]["error"][:2], name


def test_the_command_line_lists_what_there_is(sdk):
    def listed(*words: str):
        command = [python_of("tinker_sdk.py"), "-W", "ignore", "-m", "tinker.cli", "-f", "json"]
        return json.loads(succeeded(*command, *words, **sdk.variables).stdout)

    sdk()
    assert NAME in str(listed("model", "list"))
    runs = listed("run", "list")["runs"]
    assert {each["lora_rank"] for each in runs} == {None, 4, 8}
    last = runs[0]
    assert listed("run", "info", last["training_run_id"])["lora_rank"] == last["lora_rank"]
    assert listed("checkpoint", "list") == {"checkpoints": []}


def recipe(folder: Path, variables: dict, module: str, *settings: str) -> list[dict]:
    """The metrics of a recipe of the cookbook, each step's."""
    log = folder / f"log-{len([*folder.glob('log-*')])}"
    given = {"model_name": NAME, "renderer_name": "role_colon", "log_path": log}
    command = [python_of("cookbook.py"), "-W", "ignore", *module.split()]
    command += [*settings, *(f"{key}={value}" for key, value in given.items())]
    succeeded(*command, cwd=folder, **variables)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def last_saved(folder: Path, kind: str) -> str:
    logs = sorted(folder.glob("log-*/checkpoints.jsonl"))
    return json.loads(logs[-1].read_text().splitlines()[-1])[f"{kind}_path"]


MATH = "-m tinker_cookbook.recipes.math_rl.train"
GUESS = "-m tinker_cookbook.recipes.multiplayer_rl.guess_number.train"
SUPERVISED = f"{SCRIPTS / 'cookbook.py'} supervised"
STREAMED = "stream_minibatch_config.num_minibatches=2 stream_minibatch_config.groups_per_batch=8"
MODES = ["", "max_steps_off_policy=2", STREAMED]


def test_recipes_run_to_their_end(tmp_path):
    """A small model that has learned nothing; of what is sampled, the trainer says the same."""
    size = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id}
    tiny_model(max_position_embeddings=4096, **size).save_pretrained(tmp_path / NAME)
    TOKENIZER.save_pretrained(tmp_path / NAME)
    find = "import tinker_cookbook as t; print(t.__path__[0])"
    path = succeeded(python_of("cookbook.py"), "-c", find).stdout.strip()
    conversations = f"{SUPERVISED} {path}/example_data/conversations.jsonl 16"
    with serving(tmp_path) as variables:
        few = ["env=arithmetic", "groups_per_batch=8", "group_size=2", "max_steps=2"]
        for mode in ("compute_post_kl=True", *MODES[1:]):
            done = recipe(tmp_path, variables, MATH, *few, *mode.split())
            assert len(done) == 2
            for each in done:
                assert abs(each["optim/kl_sample_train_v1"]) < 1e-5
                assert abs(each.get("kl_pre_post_v1", 0)) < 1e-5
        more = ["batch_size=2", "group_size=2", "max_steps=1", "max_tokens=8", "eval_every=0"]
        (done,) = recipe(tmp_path, variables, GUESS, *more)
        assert done["env/all/turns_per_episode"] == 10
        assert abs(done["optim/kl_sample_train_v1"]) < 1e-5
        rate = ["learning_rate=1e-2", "recipe_name=conversations", "max_steps=6"]
        done = recipe(tmp_path, variables, conversations, *rate)
        assert len(done) == 6
        assert done[-1]["train_mean_nll"] < done[0]["train_mean_nll"] - 0.05


@pytest.mark.parametrize(("seed", "mode"), enumerate(MODES))
def test_math_rl_learns(seed, mode, smollm2, tmp_path):  # noqa: F811
    """48 sums show a chat model the form; what it then learns, math_rl taught it."""
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(smollm2)
    numbers, lines = random.Random(seed), []
    for x, y in [(numbers.randint(0, 100), numbers.randint(0, 100)) for _ in range(48)]:
        said = ["What is 4 + 5?", "9", f"What is {x} + {y}?", f"{x} + {y} = {x + y}"]
        roles = ["user", "assistant"] * 2
        pairs = zip(roles, said, strict=True)
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in pairs]}))
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    with serving(tmp_path, "--parallel.param-dtype", "bfloat16") as variables:
        rate = ["learning_rate=5e-4", "lr_schedule=constant", "recipe_name=sums"]
        recipe(tmp_path, variables, f"{SUPERVISED} sums.jsonl 16", *rate)
        paths = [last_saved(tmp_path, "sampler")]
        settings = ["env=arithmetic", "groups_per_batch=8", "group_size=8", "max_steps=10"]
        settings += ["max_tokens=20", "learning_rate=3e-4", "eval_every=0", "save_every=0"]
        settings += [f"load_checkpoint_path={last_saved(tmp_path, 'state')}"]
        done = recipe(tmp_path, variables, MATH, *settings, *mode.split())
        paths.append(last_saved(tmp_path, "sampler"))
        command = [python_of("cookbook.py"), "-W", "ignore", SCRIPTS / "cookbook.py", "evaluate"]
        found = succeeded(*command, NAME, "role_colon", *paths, cwd=tmp_path, **variables)
    before, _, after, _ = map(float, found.stdout.splitlines()[-4:])
    rewards = [each["env/all/reward/total"] for each in done]
    print(f"seed {seed} {mode}: {before:.2f} -> {after:.2f} held out; in training {rewards}")
    assert after > before + 0.15
    assert mean(rewards[-3:]) > rewards[0]
