"""Distillation: what teachers say of a student's tokens, and what the student makes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nemorl
from nemorl import DistillConfig, SampledTokens, TeacherConfig, TopTokens
from nemorl.data.batch import TokenBatch
from nemorl.losses.types import finalize
from nemorl.models.hub import load_tokenizer
from nemorl.parallel.backend import ForwardOutput
from nemorl.rollout import judge
from nemorl.runtime.algorithms.teachers import make_loss, open_teachers
from tests.rollout.test_judge import Fake
from tests.rollout.test_judge import served as serving
from tests.runtime.runs import (
    addition_rows,
    digits,
    distill_config,
    hinted_rows,
    of_phase,
    run_config,
    saved_model,
)
from tests.tiny_models import tiny_model

K = 8
SIZES: Any = {"num_key_value_heads": 4, "hidden_size": 128, "head_dim": 32, "scale": 3.0}
"""Of teachers: vLLM takes no smaller heads."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two teachers."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed, name in ((3, "teacher"), (5, "other")):
        saved_model(folder / name, seed=seed, **SIZES)
    return folder


def given(place: Path, rows: Any = None, *, seed: int = 0) -> dict[str, Any]:
    tokenizer, rows = load_tokenizer(str(place / "teacher")), rows or addition_rows()
    return {"model": tiny_model(seed=seed, scale=2.0), "tokenizer": tokenizer, "train": rows}


def said(config: DistillConfig, place: Path, rows: Any) -> tuple[TokenBatch, Any]:
    """A batch of samples as the teachers complete it."""
    options = {"reward": digits, **given(place, rows)}
    with nemorl.open_run(config, **options) as run, open_teachers(run) as teach:
        prompts = run.prompts()
        for step in run.steps(1):
            found = step.sample(prompts, count=3, n=2)
            batch = teach(found.to_batch(), found.rows)
            if len(config.teacher.models) > 1:
                with pytest.raises(ValueError, match="row 1: the column teacher must be one of"):
                    teach(found.to_batch(), [{}] * len(found.rows))  # as of a stream
    return batch, found


def by_plain_transformers(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """The log-probabilities of all tokens at each token of a response."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def assert_said(batch: TokenBatch, row: int, expected: Tensor, begin: int) -> None:
    """The teacher's likeliest tokens of a response are its own."""
    places = slice(begin, begin + len(expected))
    top = expected.topk(K)
    torch.testing.assert_close(batch.teacher_logprobs[row, places], top.values, atol=1e-4, rtol=0)
    at_ids = expected.gather(-1, batch.target_ids[row, places])
    torch.testing.assert_close(at_ids, top.values, atol=1e-4, rtol=0)
    assert (batch.teacher_logprobs[row, :begin] == -torch.inf).all()


@pytest.mark.slow_cases(but=["None"])
@pytest.mark.parametrize("engine", [None, "torch", "vllm"])
def test_each_row_is_scored_by_its_own_teacher(engine: str | None, place: Path, tmp_path: Path):
    """As plain transformers score it, whatever computes it."""
    names = {"a": str(place / "teacher"), "b": str(place / "other")}
    teacher = TeacherConfig(model=names, engine=engine)
    config = distill_config(tmp_path, teacher=teacher, distillation=TopTokens(top_k=K))
    rows = [{**row, "teacher": "ab"[i % 2]} for i, row in enumerate(addition_rows(8))]
    batch, found = said(config, place, rows)
    models = {"a": tiny_model(seed=3, **SIZES), "b": tiny_model(seed=5, **SIZES)}
    assert {row["teacher"] for row in found.rows} == {"a", "b"}
    for i, (row, prompt, done) in enumerate(
        zip(found.rows, found.prompts, found.completions, strict=True)
    ):
        expected = by_plain_transformers(models[row["teacher"]], [*prompt], [*done.token_ids])
        assert_said(batch, i, expected, len(prompt))


@pytest.mark.parametrize("model", [None, "self"])
def test_the_student_teaches_itself_under_another_prompt(
    model: str | None, place: Path, tmp_path: Path
):
    config = distill_config(
        tmp_path, teacher=TeacherConfig(model=model), distillation=TopTokens(top_k=K)
    )
    batch, found = said(config, place, hinted_rows())
    tokenizer, own = load_tokenizer(str(place / "teacher")), tiny_model(scale=2.0)
    for i, (row, prompt, done) in enumerate(
        zip(found.rows, found.prompts, found.completions, strict=True)
    ):
        hinted = tokenizer(row["teacher_prompt"])["input_ids"]
        expected = by_plain_transformers(own, hinted, [*done.token_ids])
        assert len(hinted) > len(prompt)
        assert_said(batch, i, expected, len(prompt))


def test_the_sampled_token_s_loss_is_the_reverse_divergence_s_gradient():
    """−Σ w · (log p − log π) · log π with rewards' advantages beside it, over steps in which tokens
    and then whole rows are left out.
    """
    generator = torch.Generator().manual_seed(0)
    config = DistillConfig(distillation=SampledTokens(coef=0.5), entropy_coef=None)
    loss_fn, shape = make_loss(config), (3, 5)
    weights = torch.rand(shape, generator=generator)
    for keep in (slice(None), slice(1, None), slice(3, None)):
        now = -3 * torch.rand(shape, generator=generator)
        teacher, rewarded = (
            -3 * torch.rand(shape, generator=generator),
            torch.randn(shape, generator=generator),
        )
        weights = torch.where(torch.arange(3)[:, None] >= (keep.start or 0), weights, 0.0)
        ones = torch.ones(shape, dtype=torch.long)
        batch = TokenBatch(
            input_ids=ones,
            segment_ids=ones,
            position_ids=ones,
            loss_mask=weights > 0,
            response_mask=ones > 0,
            loss_weights=weights,
            advantages=rewarded,
            generation_logprobs=now,
            target_ids=ones[..., None],
            teacher_logprobs=torch.where(weights > 0, teacher, torch.nan)[..., None],
        )
        logprobs = now.clone().requires_grad_()
        output = loss_fn(ForwardOutput(logprobs), batch)
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
        better = rewarded + 0.5 * (teacher - now)
        torch.testing.assert_close(gradient, torch.where(weights > 0, -weights * better, 0.0))
        trained = (now - teacher)[weights > 0]
        mean = float(trained.mean()) if len(trained) else 0.0
        assert finalize(output.metrics)["divergence"] == pytest.approx(mean, abs=1e-6)


WAYS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "top_k": {"distillation": TopTokens(top_k=K)},
    "forward over all": {"distillation": TopTokens(top_k=None, direction="forward")},
    "Jensen-Shannon": {"distillation": TopTokens(top_k=K, direction="jensen_shannon")},
    "of data": {
        "distillation": TopTokens(top_k=K, direction="forward"),
        "on_policy": False,
    },
    "with a reward": {
        "reward_coef": 0.1,
        "num_generations_per_prompt": 2,
        "num_prompts_per_step": 16,
    },
    "ahead": {"async_": nemorl.AsyncConfig(max_staleness=1)},
}


def distance(model: Any, teacher: Any, tokenizer: Any) -> float:
    """Mean KL(model‖teacher) at the places of some answers, in nats."""
    found = []
    for row in addition_rows(10):
        ids = torch.tensor([tokenizer(row["prompt"] + row["answer"])["input_ids"]])
        with torch.no_grad():
            p, q = (each(ids, use_cache=False).logits.log_softmax(-1) for each in (model, teacher))
        answer = slice(len(row["prompt"]) - 1, None)
        found.append((p.exp() * (p - q)).sum(-1)[0, answer].mean())
    return float(sum(found) / len(found))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_student_comes_near_its_teacher(way: str, seed: int, place: Path, tmp_path: Path):
    teacher = TeacherConfig(model=str(place / "teacher"))
    options = {"teacher": teacher, "num_prompts_per_step": 32, **WAYS[way]}
    config = distill_config(tmp_path, steps=40, run={"seed": seed}, **options)
    lessons, model = given(place, seed=10 + seed), tiny_model(seed=3, **SIZES)
    before = distance(lessons["model"], model, lessons["tokenizer"])
    result = nemorl.run(config, **lessons)
    assert distance(result.model, model, lessons["tokenizer"]) < 0.65 * before
    if isinstance(config.distillation, TopTokens):
        last = of_phase(result, "train")[-1]
        assert 0 < last["student_mass"] <= 1 and 0 < last["teacher_mass"] <= 1.00001


def test_a_trainer_class_distills(place: Path, tmp_path: Path):
    run = run_config(tmp_path, display="none")
    trainer = nemorl.DistillTrainer.from_pretrained(
        str(place / "other"),
        teacher={"model": str(place / "teacher")},
        distillation="top_k",  # of more than the vocabulary has
        max_num_steps=1,
        num_prompts_per_step=2,
        max_new_tokens=4,
        run=run,
    )
    result = trainer.fit([{"prompt": row["prompt"]} for row in addition_rows()])
    assert result.metrics["teacher_mass"] == pytest.approx(1) and result.metrics["reward"] == 0


def served(fake: Fake, place: Path, model: Any) -> None:
    """Answer as vLLM does."""
    tokenizer = load_tokenizer(str(place / "teacher"))

    def reply(path: str, body: dict) -> tuple[int, Any]:
        if path.endswith("/tokenize"):
            return 200, {"tokens": tokenizer(body["prompt"])["input_ids"]}
        ids, k = body["prompt"], body["prompt_logprobs"]
        places: list[Any] = [None]
        for token, all_of in zip(
            ids[1:], by_plain_transformers(model, ids[:1], ids[1:]), strict=True
        ):
            order = all_of.argsort(descending=True).tolist()
            chosen = dict.fromkeys([token, *order[:k]])
            places.append(
                {str(t): {"logprob": float(all_of[t]), "rank": order.index(t) + 1} for t in chosen}
            )
        return 200, {"choices": [{"prompt_logprobs": places}]}

    fake.reply = reply
    fake.models = {"data": [{"id": "big", "max_model_len": 64}]}


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.mark.parametrize("top_k", [0, K])
def test_a_server_scores_as_a_backend_does(top_k: int, fake: Fake, place: Path, tmp_path: Path):
    served(fake, place, tiny_model(seed=3, **SIZES))
    kind = TopTokens(top_k=K) if top_k else SampledTokens()
    batches = []
    for name, model in (("here", str(place / "teacher")), ("there", fake.url)):
        options = {"teacher": TeacherConfig(model=model), "distillation": kind}
        batches.append(said(distill_config(tmp_path / name, **options), place, addition_rows())[0])
    here, there = batches
    assert torch.equal(here.target_ids, there.target_ids)
    torch.testing.assert_close(here.teacher_logprobs, there.teacher_logprobs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, K])
def test_a_server_of_vllm_scores_as_a_backend_does(top_k: int, place: Path, tmp_path: Path):
    folder = saved_model(tmp_path / "teacher", seed=3, max_position_embeddings=1024, **SIZES)
    with serving(folder) as url:
        kind = TopTokens(top_k=K) if top_k else SampledTokens()
        batches = []
        for name, model in (("here", str(folder)), ("there", url)):
            options = {"teacher": TeacherConfig(model=model), "distillation": kind}
            config = distill_config(tmp_path / name, **options)
            batches.append(said(config, place, addition_rows())[0])
    here, there = (each.teacher_logprobs for each in batches)
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)


def refused(config: Any, place: Path, rows: Any, match: str) -> None:
    with pytest.raises((ValueError, ConnectionError), match=match):
        nemorl.run(config, **given(place, rows))
    assert not list(Path(config.run.dir).glob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_model_len": 32}, r"teacher.model http.* must have 32 positions"),
        ({"tokens": [1, 2]}, r"must have the policy's tokenizer, which reads .The caf"),
        (
            {"logprobs": None},
            r"must answer with log-probabilities of the prompt",
        ),
        ({"id": "small"}, r"must serve 'big', but it is \['small'\]"),
        ({"status": 400}, r"unknown option"),
    ],
)
def test_servers_that_can_t_teach_are_refused(change: Any, match: str, fake, place, tmp_path):
    served(fake, place, tiny_model(seed=3, **SIZES))
    (name, value), right = next(iter(change.items())), fake.reply
    fake.models = {"data": [{"id": "big", "max_model_len": 64, **change}]}

    def reply(path: str, body: dict) -> tuple[int, Any]:
        status, answer = right(path, body)
        if name == "tokens" and path.endswith("/tokenize"):
            return status, {"tokens": value}
        if path.endswith("/completions") and name == "logprobs":
            return status, {"choices": [{"text": "a"}]}
        if path.endswith("/completions") and name == "status":
            return value, {"error": {"message": "unknown option"}}
        return status, answer

    fake.reply = reply
    config = distill_config(tmp_path, teacher=TeacherConfig(model=f"{fake.url}#big"))
    refused(config, place, addition_rows(), match)


def test_teachers_and_rows_that_do_not_fit_are_refused(place: Path, tmp_path: Path):
    rows, teacher = addition_rows(), str(place / "teacher")
    both = TeacherConfig(model={"a": teacher, "b": teacher})
    for options, found, match in (
        ({"teacher": TeacherConfig()}, rows, "row 1: the column teacher_prompt must be given"),
        ({"teacher": TeacherConfig(model="self")}, rows, r"add it, or --teacher.model"),
        ({"teacher": both}, rows, "the column teacher must be one of a, b"),
        ({"teacher": both}, [{**rows[0], "teacher": "c"}], "a, b, but it is 'c'"),
        ({"teacher": TeacherConfig(model="nowhere/at/all")}, rows, "there is no folder"),
    ):
        refused(distill_config(tmp_path, **options), place, found, match)
    short = saved_model(tmp_path / "short", max_position_embeddings=16)
    config = distill_config(tmp_path / "run", teacher=TeacherConfig(model=str(short)))
    refused(config, place, rows, "must have 32 positions, for the longest row")
    other, tokenizer = saved_model(tmp_path / "other"), load_tokenizer(teacher)
    tokenizer.add_tokens(["The caf"])
    tokenizer.save_pretrained(other)
    config = distill_config(tmp_path / "run", teacher=TeacherConfig(model=str(other)))
    refused(config, place, rows, "must have the policy's tokenizer")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"generation": nemorl.GenerationConfig(top_p=0.9)}, "generation.top_p must be off"),
        ({"on_policy": False}, "distillation must be top_k without on_policy"),
        (
            {"on_policy": False, "distillation": TopTokens(), "reward_coef": 1.0},
            "reward_coef has no use without on_policy",
        ),
        ({"reward_coef": 1.0}, "num_generations_per_prompt must be at least 2"),
        ({"advantage": nemorl.GroupAdvantage(ddof=0)}, "advantage needs reward_coef above 0"),
        ({"loss": nemorl.GSPOLoss()}, "loss must be of tokens with distillation sampled"),
        ({"off_policy": nemorl.OffPolicyConfig(proximal="interpolate")}, "must be recompute"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: Any, match: str):
    with pytest.raises(ValueError, match=match):
        DistillConfig(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": "http://a/v1", "engine": "vllm"}, "teacher.model must be a folder"),
        ({"model": "self", "own_devices": True}, "teacher.model must be a folder"),
        ({"engine": "vllm"}, "teacher.model must be a folder"),
    ],
)
def test_teachers_that_contradict_themselves_are_refused(options: Any, match: str):
    with pytest.raises(ValueError, match=match):
        TeacherConfig(**options)


def test_a_server_that_is_lost_ends_the_run():
    server = judge.ScoreServer(url="http://127.0.0.1:9/v1", model="a", attempts=1)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        judge.ask(server.score([[1, 2]]))
