"""The Tinker protocol over plain HTTP: losses, order, states, samples, and what is refused."""

import itertools
import resource
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zstandard

from nemorl.parallel.config import (
    ModelConfig,
    TrainerConfig,
)
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.cli.inference import served
from nemorl.runtime.cli.settings import ServeConfig
from nemorl.runtime.run.parts import Backends
from nemorl.runtime.serve.tinker import training
from nemorl.runtime.serve.tinker.messages import MESSAGES
from tests.runtime.serve.tinker.wire import KEYS, Client, arrays, csr, datum, said, serving
from tests.tiny_models import tiny_model, tiny_tokenizer

TEXTS = [[5, 9, 12, 7, 30, 6], [8, 8, 21], [17, 4, 11, 19]]
TARGETS = [[9, 12, 7, 30, 6, 2], [8, 21, 33], [4, 11, 19, 1]]
SAMPLER = "save_weights_for_sampler"
PLAIN = [datum(x, target_tokens=y) for x, y in zip(TEXTS, TARGETS, strict=True)]


def close(found, expected):
    found, expected = (torch.tensor(np.array(each)) for each in (found, expected))
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def logits():
    """Of the base model, as transformers has them; per text, of each position."""
    model = tiny_model(scale=2.0)
    with torch.no_grad():
        return [model(torch.tensor([x])).logits[0].log_softmax(-1) for x in TEXTS]


# Losses


def parts(seed=0):
    """What a sampler's log-probabilities differ by, and advantages, of each text."""
    draw = torch.Generator().manual_seed(seed)
    noise = [torch.randn(len(x), generator=draw) / 2 for x in TEXTS]
    advantages = [torch.randn(len(x), generator=draw) for x in TEXTS]
    advantages[0][1] = 0.0
    return noise, advantages


def clipped(r, a, low, high):
    return -torch.minimum(r * a, r.clamp(low, high) * a).sum()


def of_sequence(now, q, mask):
    log_ratio = ((now - q) * mask).sum() / mask.sum()
    return (log_ratio + now - now.detach()).detach().exp() * (now - now.detach()).exp()


LOW, HIGH = np.array([0.9, 0.1, 0.5, 0.99, 0.7, 0.6]), np.array([1.1, 3, 1.5, 1.01, 2, 1.2])
MASK = np.array([1, 0, 1, 1, 1, 1])
RATIO = {"sequence_ratio_mask": MASK}
BOUNDS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
FORMULAS = {
    "importance_sampling": ({}, {}, lambda now, q, a: -((now - q).exp() * a).sum()),
    "ppo": ({}, {}, lambda now, q, a: clipped((now - q).exp(), a, 0.8, 1.2)),
    "ppo with settings": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05},
        {},
        lambda now, q, a: clipped((now - q).exp(), a, 0.5, 1.05),
    ),
    "ppo with bounds of tokens": (
        {},
        BOUNDS,
        lambda now, q, a: clipped(
            (now - q).exp(), a, torch.tensor(LOW[: len(a)]), torch.tensor(HIGH[: len(a)])
        ),
    ),
    "cispo": (
        {"clip_high_threshold": 1.2},
        {},
        lambda now, q, a: -((now - q).exp().clamp(0.0, 1.2).detach() * a * now).sum(),
    ),
    "dro": (
        {"beta": 0.3},
        {},
        lambda now, q, a: -(a * now - 0.15 * (now - q) ** 2).sum(),
    ),
    "gspo": (
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        RATIO,
        lambda now, q, a: clipped(of_sequence(now, q, torch.tensor(MASK[: len(a)])), a, 0.9, 1.1),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_are_their_formulas(me, logits, name):
    """Values, and gradients: cross entropy with weights ∂L/∂logprob takes them back."""
    config, more, formula = FORMULAS[name]
    noise, advantages = parts()
    now = [x[range(len(y)), y] for x, y in zip(logits, TARGETS, strict=True)]
    prev = [a + b for a, b in zip(now, noise, strict=True)]
    if name == "gspo":
        advantages = [a * torch.tensor(MASK[: len(a)]) for a in advantages]
    given = [leaf.detach().requires_grad_() for leaf in now]
    losses = [formula(*each) for each in zip(given, prev, advantages, strict=True)]
    gradients = torch.autograd.grad(sum(losses), given)
    data, back = [], []
    for x, y, q, a, g in zip(TEXTS, TARGETS, prev, advantages, gradients, strict=True):
        extra = {key: value[: len(x)] for key, value in more.items()}
        data.append(datum(x, target_tokens=y, logprobs=q, advantages=a, **extra))
        back.append(datum(x, target_tokens=y, weights=g))
    model, loss = me.create(), name.split()[0]
    value, found = me.passed(model, data, loss, **config)
    assert value == pytest.approx(sum(losses).item(), rel=1e-5)
    for mine, expected in zip(found, now, strict=True):
        close(mine, expected)
    norm = me.step(model, learning_rate=0.0)["metrics"]["grad_norm"]
    assert me.passed(model, data, loss, only=True, **config)[0] == pytest.approx(value)
    me.passed(model, data, loss, **config)
    me.passed(model, back, "cross_entropy")
    left = me.step(model, learning_rate=0.0)["metrics"]["grad_norm"]
    assert norm > 0.1 and left < 1e-4 * norm


def test_gradients_are_autograds(me):
    """Of all parameters, with targets that are not the next tokens and weights of both signs."""
    found, advantages = tiny_model(scale=2.0), parts()[1]
    data = []
    for x, y, a in zip(TEXTS, TARGETS, advantages, strict=True):
        logprobs = found(torch.tensor([x])).logits[0].log_softmax(-1)
        (-(a * logprobs[range(len(y)), y]).sum()).backward()
        data.append(datum(x, target_tokens=y, weights=a))
    norm = torch.nn.utils.get_total_norm(x.grad for x in found.parameters())
    me.passed(model := me.create(0), data, "cross_entropy")
    assert me.step(model)["metrics"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("form", [np.asarray, csr])
def test_soft_targets_are_sums_over_k(me, logits, form):
    draw = np.random.default_rng(0)
    data, back, expected, values = [], [], [], 0.0
    for x, each in zip(TEXTS, logits, strict=True):
        shape = len(x), 3
        y, w = draw.integers(2, 42, shape), draw.normal(size=shape).astype("f4")
        y[0, 1:], w[0, 1:] = 0, 0.0  # fewer than k
        w[-1] = 0.0
        mask = [1, 0, *[1] * (len(x) - 2)]
        data.append(datum(x, target_tokens=form(y), weights=form(w), mask=mask))
        w[1] = 0.0
        back += [datum(x, target_tokens=y[:, k], weights=-w[:, k]) for k in range(3)]
        expected.append(each.gather(1, torch.tensor(y)))
        values -= float((torch.tensor(w) * expected[-1]).sum())
    model = me.create()
    for only in (True, False):
        value, found = me.passed(model, data, "cross_entropy", only=only)
        assert value == pytest.approx(values, rel=1e-5)
        for mine, each in zip(found, expected, strict=True):
            close(mine, each)
    me.passed(model, back, "cross_entropy")
    assert me.step(model, learning_rate=0.0)["metrics"]["grad_norm"] < 1e-4


# Identity


def answers(client, model, steps=2, seed=0):
    """What a model answers to some steps."""
    for _, advantages in (parts(seed + n) for n in range(steps)):
        data = [
            datum(x, target_tokens=y, weights=a)
            for x, y, a in zip(TEXTS, TARGETS, advantages, strict=True)
        ]
        for half in (data[:2], data[2:]):
            yield repr(client.passed(model, half, "cross_entropy"))
        metrics = client.step(model)["metrics"]
        yield repr((metrics["loss"], metrics["grad_norm"]))


def trained(*args, **options):
    return [*answers(*args, **options)]


@pytest.fixture(scope="module")
def usual(me):
    """The answers of a model of its own."""
    return trained(me, me.create())


def test_a_repetition_is_the_same_request(me):
    model = me.create()
    body = me.work(model, PLAIN, "cross_entropy", seq_id=1)
    promises = [me.ok("forward_backward", body) for _ in range(2)]
    assert promises[0] == promises[1]
    first = me.result(promises[0])
    assert me.result(me.ok("forward_backward", body)) == first
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    promise = me.ok("optim_step", **step)
    for verb, other in [
        ("optim_step", {"seq_id": 1}),
        ("optim_step", {"adam_params": {"learning_rate": 0.02}}),
        ("save_weights", {"adam_params": None, "path": "a"}),
    ]:
        found = me.post(verb, **{**step, **other})
        assert found.status_code == 400 and "must be new" in found.text, other
    assert me.ok("optim_step", **step) == promise
    assert me.result(promise)["metrics"]["grad_norm"] > 0


def test_requests_wait_for_those_before_them(me, usual):
    model = me.create()
    data = [
        datum(x, target_tokens=y, weights=a)
        for x, y, a in zip(TEXTS, TARGETS, parts()[1], strict=True)
    ]
    last = me.ask("optim_step", model, seq_id=3, adam_params={"learning_rate": 0.01})
    second = me.send(model, data[2:], "cross_entropy", seq_id=2)
    me.send(model, data[:2], "cross_entropy", seq_id=1)
    metrics = me.result(last)["metrics"]
    assert repr((metrics["loss"], metrics["grad_norm"])) == usual[2]
    assert me.result(second) is not None


@pytest.mark.slow_cases("0-1-2")
@pytest.mark.parametrize(("rank", "live", "steps"), [(4, 8, 2), (4, 1, 1), (0, 1, 2)])
def test_models_in_turns_do_not_touch_each_other(me, usual, monkeypatch, rank, live, steps):
    """Nor does it matter if each leaves the memory for the other."""
    monkeypatch.setattr(training, "LIVE", live)
    other = usual if rank else trained(me, me.create(rank), steps)
    models = me.create(4), me.create(rank)
    in_turns = zip(*(answers(me, each, steps) for each in models), strict=True)
    assert [[*each] for each in zip(*in_turns, strict=True)] == [
        usual[: 3 * steps],
        other[: 3 * steps],
    ]


# States


def test_states_are_exact_with_and_without_the_optimizer(me):
    model = me.create()
    trained(me, model, 1)
    path = me.save(model, "one", user_metadata={"a": "b"})
    expected = trained(me, model, 2, seed=5)
    assert trained(me, me.create(state=path), 2, seed=5) == expected
    fresh = trained(me, me.create(state=path, optimizer=False), 2, seed=5)
    assert fresh[:2] == expected[:2] and fresh[3:] != expected[3:]
    old = me.create()
    assert "error" not in me.result(me.ask("load_weights", old, path=path, optimizer=True))
    assert trained(me, old, 2, seed=5) == expected
    late = me.result(me.ask("load_weights", old, path=path, optimizer=True))
    assert "first request" in late["error"]


def test_names_are_taken_listed_in_pages_and_deleted(me, you):
    model = me.create()
    paths = [me.save(model, "a"), me.save(model, "a", SAMPLER), me.save(model, "b")]
    kinds = ["weights/a", "sampler_weights/a", "weights/b"]
    assert paths == [f"tinker://{model}/{kind}" for kind in kinds]
    assert "must be new" in me.save(model, "a")
    assert me.save(model, "a", overwrite=True) == paths[0]

    def listed(path=f"training_runs/{model}/checkpoints"):
        found = me.http.get(path).json()["checkpoints"]
        assert all(each["size_bytes"] > 0 for each in found)
        return sorted(each["tinker_path"] for each in found)

    assert listed() == sorted(paths)
    page = me.http.get("checkpoints", params={"limit": 1, "offset": 1}).json()
    assert len(page["checkpoints"]) == 1 and page["cursor"]["total_count"] >= 3
    runs = me.http.get("training_runs", params={"limit": 1}).json()
    (run,) = runs["training_runs"]
    assert run["training_run_id"] == model and run["last_checkpoint"]["checkpoint_id"] in kinds
    assert you.http.get("training_runs").json()["training_runs"] == []
    assert me.http.delete(f"training_runs/{model}/checkpoints/a").status_code >= 400
    assert me.http.delete(f"training_runs/{model}/checkpoints/{kinds[0]}").status_code == 200
    assert listed() == sorted(paths[1:])
    url = f"training_runs/{model}/checkpoints/{kinds[2]}/ttl"
    assert me.http.put(url, json={"ttl_seconds": -1}).status_code == 400
    assert me.http.put(url, json={"ttl_seconds": 1}).status_code == 200
    short = me.save(model, "c", ttl_seconds=1)
    assert short in listed()
    time.sleep(1.1)
    assert listed() == [paths[1]]
    for path in (short, *paths[::2]):
        found = me.post(
            "load_weights", session_id=me.session, model_seq_id=900, path=path, optimizer=True
        )
        assert found.status_code == 404


def test_what_has_lost_its_state_says_so(me):
    model, new = me.create(), next(me.models)
    path, sampler = me.save(model, "a"), me.sampler(me.save(model, "a", SAMPLER))
    me.send(model, [datum([3] * 250, target_tokens=[3] * 250)] * 20, "cross_entropy")  # first
    body = {"session_id": me.session, "model_seq_id": new, "path": path, "optimizer": True}
    promise = me.ok("load_weights", **body)
    for kind in ("weights", "sampler_weights"):
        url = f"training_runs/{model}/checkpoints/{kind}/a"
        assert me.http.delete(url).status_code == 200
    assert "error" in me.result(promise)
    body = me.work(promise["model_id"], PLAIN, "cross_entropy", seq_id=1)
    assert "error" in me.result(me.ok("forward_backward", body))
    assert "was deleted" in str(me.sample(sampler, TEXTS[0], max_tokens=1))


# Samples


@pytest.fixture(scope="module")
def base(me):
    return me.sampler()


def test_greedy_tokens_are_the_models(me, base):
    model, prompt = tiny_model(scale=2.0), TEXTS[0]
    ids = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0]
        ids.append(int(found[-1].argmax()))
    logprobs = found.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    options = {"max_tokens": 6, "stop": [], "prompt_logprobs": True}
    for how in ({"temperature": 0.0}, {"top_k": 1, "seed": 3}):
        answer = me.sample(base, prompt, **options, **how)
        assert said(answer) == [ids[len(prompt) :]] and answer.sequences[0].reason == 1
        scored = arrays(answer.prompt_logprobs)
        assert np.isnan(scored[0])
        close(scored[1:], logprobs[: len(prompt) - 1])
        if "temperature" in how:
            close(arrays(answer.sequences[0].logprobs), logprobs[len(prompt) - 1 :])


def test_seeds_repeat_and_samples_differ(me, base):
    def drawn(seed):
        answer = me.sample(base, TEXTS[1], max_tokens=12, seed=seed, num_samples=4)
        return said(answer)

    assert drawn(1) == drawn(1) != drawn(2) and len(set(map(tuple, drawn(1)))) > 1


def test_tokens_that_stop_are_returned(me, base):
    whole = said(me.sample(base, TEXTS[0], max_tokens=12, seed=1, stop=[]))[0]
    assert len(whole) == 12
    text = tiny_tokenizer().decode(whole[3:5])
    for stop in ([whole[4]], [text], text):
        answer = me.sample(base, TEXTS[0], max_tokens=12, seed=1, stop=stop)
        end = whole.index(whole[4]) if stop == [whole[4]] else 4
        assert said(answer) == [whole[: end + 1]] and answer.sequences[0].reason == 0
        assert len(arrays(answer.sequences[0].logprobs)) == end + 1


def test_what_is_asked_about_a_prompt(me, base, logits):
    prompt, every = TEXTS[0], logits[0]
    draw = np.random.default_rng(1)
    asked = draw.integers(0, 42, (5, 2))
    asked[2, 1] = -1
    sparse = {
        "data": [3, 4, -1],
        "sparse_crow_indices": [0, 1, 1, 1, 3, 3],
        "sparse_col_indices": [0, 0, 1],
    }
    dense = {"data": asked.reshape(-1).tolist()}
    tensor = {"dtype": "int64", "shape": [5, 2]}
    answer = me.sample(
        base,
        prompt,
        max_tokens=1,
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=dense | tensor,
        prompt_alt_tokens_k=4,
    )
    scored = arrays(answer.prompt_logprobs)
    assert np.isnan(scored[:4]).all()
    close(scored[4:], every[[3, 4], prompt[4:]])
    best = every[:-1].topk(3)
    ids = np.frombuffer(answer.top.ids, "<i4").reshape(6, 3)
    values = arrays(answer.top.logprobs).reshape(6, 3)
    assert not ids[:4].any() and (values[:4] == -99999).all()
    assert ids[4:].tolist() == best.indices[3:].tolist()
    close(values[4:], best.values[3:])
    top = answer.sequences[0].top
    assert (top.k, top.length) == (2, 1)
    assert np.frombuffer(top.ids, "<i4").tolist() == every[-1].topk(2).indices.tolist()
    found = arrays(answer.targets.dense).reshape(5, 2)
    expected = every[:-1].gather(1, torch.tensor(asked.clip(0))).numpy() * (asked >= 0)
    close(found, expected)
    tokens = np.frombuffer(answer.alternatives.tokens.dense, "<i8").reshape(5, 4)
    close(
        arrays(answer.alternatives.logprobs.dense).reshape(5, 4),
        every[:-1].gather(1, torch.tensor(tokens)),
    )
    answer = me.sample(base, prompt, max_tokens=1, target_prompt_logprobs=sparse | tensor)
    assert not answer.prompt_logprobs and not answer.top.k
    close(
        arrays(answer.targets.csr.values),
        torch.stack([every[0, 3], every[3, 4], torch.tensor(0.0)]),
    )
    assert np.frombuffer(answer.targets.csr.rows, "<i8").tolist() == sparse["sparse_crow_indices"]


def test_samplers_have_the_weights_that_were_saved(me):
    """In memory and from the disk."""
    for rank in (4, 0):
        model = me.create(rank)
        me.passed(model, PLAIN, "cross_entropy")
        me.step(model)
        expected = me.passed(model, PLAIN[:1], "cross_entropy", only=True)[1][0]
        promise = me.ask(
            "save_weights_for_sampler", model, sampling_session_seq_id=next(me.samplers)
        )
        live = me.result(promise)["sampling_session_id"]
        me.counts[live] = itertools.count()
        stored = me.sampler(me.save(model, "a", SAMPLER))
        for _ in range(2):
            for sampler in (live, stored):
                answer = me.sample(sampler, [*TEXTS[0], 2], max_tokens=1, prompt_logprobs=True)
                close(arrays(answer.prompt_logprobs)[1:], expected)
            me.passed(model, PLAIN, "cross_entropy")
            me.step(model)


# What is refused

X, Y, SGD = TEXTS[0], TARGETS[0], {"type": "sgd"}
NAN = [float("nan")] * 6
PPO = {"target_tokens": Y, "logprobs": [0.0] * 6, "advantages": [1.0] * 6}
FAILING = [
    ("one of cross_entropy", [datum(X, target_tokens=Y)], "unheard_of"),
    ("importance_sampling is the nearest", [datum(X, target_tokens=Y)], "stable_reinforce"),
    ("but has 'surprise'", [datum(X, **PPO)], "ppo", {"surprise": 1.0}),
    ("must be a number, 0 or more", [datum(X, **PPO)], "ppo", {"clip_low_threshold": float("nan")}),
    ("must lie around 1", [datum(X, **PPO)], "ppo", {"clip_low_threshold": 1.5}),
    ("must lie around 1", [datum(X, **PPO, clip_high_threshold=[0.5] * 6)], "cispo"),
    ("beta must be given", [datum(X, **PPO)], "dro"),
    ("must not be empty", []),
    ("1 to 255 tokens", [datum([], target_tokens=Y)]),
    ("1 to 255 tokens", [datum([3] * 300, target_tokens=[3] * 300)]),
    ("token ids below 42", [datum([99], target_tokens=[3])]),
    (
        "data.1.loss_fn_inputs.target_tokens must be token ids",
        [PLAIN[0], datum(X, target_tokens=[-1] * 6)],
    ),
    ("must be [6] or [6, k], but is [3]", [datum(X, target_tokens=Y[:3])]),
    ("weights must be finite", [datum(X, target_tokens=Y, weights=NAN)]),
    (
        "weights must be [6] as",
        [datum(X, target_tokens=Y, weights=[[1.0]] * 6)],
    ),
    ("logprobs must be given", [datum(X, target_tokens=Y)], "importance_sampling"),
    ("inputs of ppo, but has ['surprise']", [datum(X, **PPO, surprise=Y)], "ppo"),
    ("images or audio", [MESSAGES["Datum"](chunks=[{"image": b"x"}])]),
]


def test_bad_work_fails_its_future_and_takes_no_gradient(me, usual):
    model = me.create()
    for reason, data, *more in FAILING:
        loss, config = [*more, *["cross_entropy", {}][len(more) :]]
        assert reason in str(me.passed(model, data, loss, **config)[0]), reason
    assert "needs a gradient" in me.step(model)["error"]
    for adam in ({"learning_rate": -1}, {"beta1": 2.0}, {"surprise": 1}, {"learning_rate": "x"}):
        assert "error" in me.step(model, **adam)
    assert "snapshot" in me.save(model, "a", SAMPLER, kind="inflight")
    for name in ("../a", "a/b", ".a", "", "a" * 200, "a" + "漢" * 120, "a\0"):
        assert "must be letters" in me.save(model, name), name
    assert "is not of this service" in me.save(model, "a", "save_weights_external")
    assert trained(me, model, 1) == usual[:3]


SAMPLES = [
    ("token ids below 42", {"tokens": [99]}),
    ("token ids below 42", {"tokens": []}),
    ("must leave room", {"tokens": [3] * 256}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": 0.0}),
    ("empty string", {"stop": [""]}),
    ("below the prompt's length", {"prompt_logprobs": True, "prompt_logprobs_last_n": 6}),
    ("must be at most the 42 tokens", {"topk_prompt_logprobs": 43}),
    ("stable_reinforce", {"record_stability_info": True}),
    (
        "-1 of shape",
        {"target_prompt_logprobs": {"data": [99] * 5, "dtype": "int64", "shape": [5, 1]}},
    ),
    ("-1 of shape", {"target_prompt_logprobs": {"data": [3], "dtype": "int64", "shape": [1, 1]}}),
]


@pytest.mark.parametrize(("reason", "body"), SAMPLES)
def test_bad_samples_fail(me, base, reason, body):
    assert reason in str(me.sample(base, **{"tokens": TEXTS[0], "max_tokens": 1, **body}))


def test_bodies_that_can_not_be_read_are_refused(me):
    work = me.work(model := me.create(), PLAIN, "cross_entropy")
    packed = {"content-encoding": "zstd"}
    bomb = zstandard.compress(bytes(1 << 26))
    for status, content, headers in [
        (413, bytes(40 << 20), {}),
        (413, bomb, packed),
        (400, b"no zstd", packed),
        (400, b"\xff\xff\xff", {}),
        (400, work[:-3], {}),
        (400, work, {"content-encoding": "gzip"}),
    ]:
        found = me.http.post("forward_backward", content=content, headers=headers)
        assert found.status_code == status, found.text
    for content in (b"", b"[]", b"{", b"[" * 10**5, b'{"request_id": ' + b"9" * 10**5 + b"}"):
        assert me.post("retrieve_future", content).status_code in (400, 404)
    sent = me.http.post("forward_backward", content=zstandard.compress(work), headers=packed)
    assert me.result(sent.json())
    assert me.step(model)["metrics"]["grad_norm"] > 0
    assert 'kind="trained"' in me.http.get(me.http.base_url.join("/metrics")).text


def test_what_is_no_request_is_refused(me, you, usual):
    model, sampler = me.create(), me.sampler()
    path = me.save(model, "mine")
    lora = {"rank": 4}
    made = {"session_id": me.session, "model_seq_id": 700, "base_model": "tiny"}
    made["lora_config"] = lora
    load = {"session_id": me.session, "model_seq_id": 701, "optimizer": True}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "sampling_params": {"max_tokens": 1}}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    adam = {"adam_params": {}}
    for key, status in (("tml-nobody", 401), (KEYS["monitor"], 403)):
        headers = {"x-api-key": key}
        assert me.http.post("create_session", json={}, headers=headers).status_code == status
    wrong = []
    for status, client, verb, body in [
        (400, me, "create_model", {**made, "lora_config": {"rank": -1}}),
        (400, me, "create_model", {**made, "base_model": "other"}),
        (400, me, "create_model", {**made, "lora_config": lora | {"surprise": 1}}),
        (400, me, "create_model", {**made, "optimizer_config": SGD}),
        (404, me, "create_model", {**made, "session_id": "../" * 9}),
        (404, me, "create_model", {**made, "session_id": "a" * 300}),
        (404, you, "create_model", made),
        (404, me, "load_weights", {**load, "path": path + "x"}),
        (400, me, "load_weights", {**load, "path": f"tinker://{model}/weights/../../x"}),
        (400, me, "load_weights", {**load, "path": "file:///etc/passwd"}),
        (404, you, "load_weights", {**load, "session_id": you.session, "path": path}),
        (404, you, "weights_info", {"tinker_path": path}),
        (404, you, "get_info", {"model_id": model}),
        (404, me, "get_info", {"model_id": []}),
        (404, you, "optim_step", {"model_id": model, "seq_id": 1, **adam}),
        (404, me, "optim_step", {"model_id": "no", "seq_id": 1, **adam}),
        (400, me, "optim_step", {"model_id": model, "seq_id": True, **adam}),
        (400, me, "optim_step", {"model_id": model, "seq_id": -1, **adam}),
        (404, you, "asample", {**sample, "prompt": prompt}),
        (404, me, "asample", {**sample, "prompt": prompt, "sampling_session_id": "../x"}),
        (400, me, "asample", {**sample, "prompt": prompt, "seq_id": 10**20}),
        (400, me, "asample", {**sample, "prompt": prompt, "num_samples": 1000}),
        (400, me, "asample", {**sample, "prompt": image}),
        (400, me, "asample", {**sample, "prompt": prompt, "prompt_alt_tokens_k": 10**9}),
        (404, you, "retrieve_future", {"request_id": f"{model}#0"}),
        (404, me, "retrieve_future", {"request_id": "../../x"}),
        (410, me, "retrieve_future", {"request_id": f"{model}#5"}),
        (404, me, "unheard_of", {}),
    ]:
        found = client.post(verb, **body)
        if found.status_code != status or len(found.text) > 1000:
            wrong.append((status, verb, str(body)[:200], found.status_code, found.text[:200]))
    assert not wrong, "\n".join(map(str, wrong))
    for url in ("..%2f..", "../weights", "weights/%2e%2e", "weights/a%00"):
        found = me.http.delete(f"training_runs/{model}/checkpoints/{url}")
        assert found.status_code in (400, 404, 405), found.text
    assert trained(me, model, 1) == usual[:3]


@contextmanager
def full_disk(most=0):
    """No file may become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_fails_what_it_has_no_room_for(me):
    model = me.create()
    body = {"model_id": model, "seq_id": 1, "adam_params": {}}
    with full_disk():
        found = me.post("optim_step", **body)
        assert found.status_code == 422 and "make room" in found.text
    with full_disk(4096):
        assert "written" in me.save(model, "a")
    assert me.save(model, "a").endswith("/a")


def test_a_model_is_made_once_however_old_its_first_request(me, monkeypatch):
    monkeypatch.setattr(training, "KEPT_ANSWERS", 0)
    monkeypatch.setattr(training, "SAVED_SHARE", 1e9)  # a restart point after each step
    model = me.create()
    for _ in range(3):
        me.passed(model, PLAIN, "cross_entropy")
        me.step(model)
    session, _, place = model.split(":")
    body = {"session_id": session, "model_seq_id": int(place), "base_model": "tiny"}
    assert "must be new" in me.post("create_model", **body, lora_config={"rank": 8}).text


def test_a_folder_is_of_one_model(service):
    its, model = service.folder / "its", ModelConfig(path=str(service.folder / "its/another"))
    shutil.copytree(service.folder / "tiny", model.path)
    shutil.copy(service.folder / "run/config.yaml", its)
    config = ServeConfig(model=model, tinker=True, dir=str(its), port=0)
    with pytest.raises(ValueError, match=r"dir must be of the model .*another'"), served(config):
        pass


@pytest.mark.slow
def test_trainer_and_engine_share_a_device_in_turns(tmp_path, monkeypatch):
    """Clients that sample without a pause keep no model from training."""
    events, ended = list[str](), threading.Event()
    engine = TorchGenerationBackend
    for cls, name in ((engine, "sleep"), (engine, "wake"), (training.ModelTrainer, "_execute")):
        method = getattr(cls, name)
        noted = lambda *args, n=name, m=method: (events.append(n), m(*args))[1]  # noqa: E731
        monkeypatch.setattr(cls, name, noted)
    monkeypatch.setattr(Backends, "in_turns", True)
    with serving(tmp_path, tiny_model(), trainer=TrainerConfig(device="cpu")) as url:
        me = Client(url, KEYS["me"])
        model, sampler = me.create(), me.sampler()

        def sample(length: int) -> None:
            while not ended.is_set():
                me.sample(sampler, [3, 4], max_tokens=length, stop=[])

        with ThreadPoolExecutor(8) as threads:
            threads.map(sample, range(100, 220, 15))
            for _ in range(5):
                me.passed(model, PLAIN, "cross_entropy")
                assert "error" not in me.step(model)
            ended.set()
    assert events.count("_execute") == 11
    order = "".join(each[0] for each in events)
    assert "w_" not in order and "w" in order
