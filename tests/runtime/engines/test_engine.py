import json
import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemorl.rollout.generation import SamplingParams
from nemorl.runtime.config.generation import GenerationConfig
from nemorl.runtime.engines.engine import Engine, EngineStartError, _finished, _last_error, _Tokens
from nemorl.runtime.engines.spec import EngineSpec, Request, Sample, engine_spec, vocabulary_hash
from nemorl.runtime.engines.weight_buckets import expected_weights
from nemorl.runtime.engines.weight_transport import LocalReceiver, WeightSender
from nemorl.runtime.engines.worker import VLLMWorker
from tests.tiny_models import random_prompts, tiny_model, tiny_tokenizer
from tests.vllm_engines import CACHE, running_engine, small_model

pytestmark = pytest.mark.xdist_group("vllm")
LONG = [2 + i % 39 for i in range(100)]
"""A prompt of several blocks of the cache."""


def spec_of(model: Any, *, max_batch_size: int = 64, **settings: Any) -> EngineSpec:
    config = GenerationConfig(
        backend="vllm", max_batch_size=max_batch_size, **{"engine": CACHE, **settings}
    )
    return engine_spec(model, tiny_tokenizer(), config, precision="float32")


def engine_of(model: Any, **settings: Any) -> Engine:
    engine = running_engine(spec_of(model, **settings), expected_weights(model.config)).engine
    give(engine, model)
    return engine


def give(engine: Engine, model: Any, value: float | None = None) -> None:
    """The engine has the model's weights, or this number everywhere."""
    weights = [
        (name, p if value is None else torch.full_like(p, value))
        for name, p in model.named_parameters()
    ]
    sender = WeightSender(expected_weights(model.config), dtype=torch.float32, transport="direct")
    assert sender.send(weights, [LocalReceiver(engine)]) == {}


def request(id: int = 0, prompt: Any = (5, 6, 7), **params: Any) -> Request:
    return Request(
        id=id,
        prompt=tuple(prompt),
        params=SamplingParams(**{"seed": 0, "max_new_tokens": 8, **params}),
    )


def run(engine: Engine) -> dict[int, tuple[Sample, ...]]:
    done = {}
    while engine.unfinished:
        done |= {finished.id: finished.samples for finished in engine.step()}
    return done


def generate(engine: Engine, *requests: Request) -> dict[int, tuple[Sample, ...]]:
    engine.add(requests)
    return run(engine)


def runner_of(engine: Engine) -> Any:
    return engine._llm.model_executor.driver_worker.worker.model_runner


def greedy(model: Any, prompt: list[int], length: int = 8) -> list[int]:
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt))
    return model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0
    )[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"block_sise": 32},
            "unknown argument 'block_sise' in generation.engine; did you mean block_size",
        ),
        ({"block_size": "many"}, "block_size: Input should be a valid integer"),
        (
            {"gpu_memory_utilization": 7},
            "gpu_memory_utilization: Input should be less than or equal to 1",
        ),
        (
            {"kv_cache_memory_bytes": 2**50},
            "Available memory on node 0 .* is less than requested memory",
        ),
        (
            {"enable_chunked_prefill": True},
            "generation.engine's enable_chunked_prefill must be off where there is no GPU",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_the_engines_own_reason_first(
    engine, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    grouped = torch.distributed.is_initialized()
    with pytest.raises(EngineStartError, match=f"^{message}"):
        Engine(spec_of(small_model(), engine=engine))
    assert torch.distributed.is_initialized() == grouped
    assert not list(tmp_path.glob("nemorl-*"))


@pytest.mark.parametrize("name", ["max_num_seqs", "dtype", "tensor_parallel_size", "load_format"])
def test_arguments_that_are_not_the_users_name_the_setting(name):
    with pytest.raises(
        ValueError, match=f"generation.engine's {name} must be left to nemorl, but it is 3: "
    ):
        spec_of(small_model(), engine={name: 3})


def test_a_model_that_vllm_does_not_know_is_refused():
    spec = spec_of(small_model())
    config = {**json.loads(spec.files["config.json"]), "architectures": ["StrangeForCausalLM"]}
    with pytest.raises(
        EngineStartError, match=r"^Model architectures \['StrangeForCausalLM'\] are not supported"
    ) as refused:
        Engine(replace(spec, files={**spec.files, "config.json": json.dumps(config).encode()}))
    assert len(str(refused.value)) < 600


def test_a_model_that_vllm_cannot_compute_here_is_refused_at_the_start():
    with pytest.raises(
        EngineStartError, match=r"^Unsupported CPU attention configuration: head_dim=8"
    ):
        Engine(spec_of(tiny_model()))


def test_another_tokenizer_is_refused(tmp_path):
    other = tiny_tokenizer()
    other.add_tokens(["zz"])
    other.save_pretrained(tmp_path)
    with pytest.raises(
        EngineStartError, match=r"^the engine's tokenizer must have the trainer's tokens"
    ):
        Engine(spec_of(small_model(), engine={**CACHE, "tokenizer": str(tmp_path)}))


def test_sleeping_needs_a_gpu():
    with pytest.raises(
        EngineStartError,
        match=r"generation.sleep_level must be 0 where there is no GPU, but it is 2",
    ):
        Engine(spec_of(small_model(), sleep_level=2))


def test_without_vllm_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        EngineStartError, match=r"vLLM can't be imported .* pip install \"nemorl\[vllm\]\""
    ):
        Engine(spec_of(small_model()))


def test_the_vocabulary_is_told_by_its_numbers():
    longer = tiny_tokenizer()
    longer.add_tokens(["zz"])
    assert (
        vocabulary_hash(tiny_tokenizer())
        == vocabulary_hash(tiny_tokenizer())
        != vocabulary_hash(longer)
    )


def test_more_room_than_the_model_has_positions_is_a_warning():
    with pytest.warns(
        UserWarning,
        match=(
            r"generation.max_model_len is lowered from 9999 to 256, the positions that the"
            r" model has"
        ),
    ):
        assert spec_of(small_model(), max_model_len=9999).max_model_len == 256


def test_what_a_process_of_the_engines_has_said_last_is_found_in_a_log(tmp_path):
    (tmp_path / "log").write_text(
        "(Worker_TP0 pid=7) ERROR 11-20 18:10:40 [multiproc_executor.py:953] WorkerProc failed to"
        " start.\n(Worker_TP0 pid=7) ERROR 11-20 18:10:40 [multiproc_executor.py:953]"
        " torch.OutOfMemoryError: tried to get [3] GiB\nat last\n"
    )
    assert _last_error(tmp_path / "log") == "torch.OutOfMemoryError: tried to get [3] GiB"
    assert _last_error(Path("/dev/null")) == ""


def test_the_process_stays_as_it_was(tmp_path, monkeypatch):
    """The trainer may live in it: its random numbers, its environment, its threads."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def numbers() -> tuple[float, float]:
        return float(torch.rand(())), float(np.random.rand())

    model = small_model()
    spec = spec_of(model)
    torch.manual_seed(3)
    np.random.seed(3)
    expected, environment = numbers(), dict(os.environ)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    random.random()
    words = random.getstate()[1][:-1]  # the tests' checks of types draw some of them
    engine = Engine(spec)
    assert random.getstate()[1][:-1] == words
    assert not list(tmp_path.glob("nemorl-*"))
    give(engine, model)
    generate(engine, request(n=3))
    assert numbers() == expected
    assert dict(os.environ) == environment
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    engine.shutdown()
    assert not torch.distributed.is_initialized()


def test_samples_share_the_prefill_of_their_prompt(monkeypatch):
    engine, seen = engine_of(small_model()), []
    step = engine._llm.step
    monkeypatch.setattr(engine._llm, "step", lambda: seen.append(step()) or seen[-1])
    generate(engine, request(prompt=LONG, n=4))
    cached = {output.request_id: output.num_cached_tokens for outputs in seen for output in outputs}
    assert cached == {"0/0": 0, "0/1": 96, "0/2": 96, "0/3": 96}


def test_a_sample_depends_on_its_seed_and_number_alone():
    """vLLM's own n samples draw from seed, seed + 1, …: sample 1 would be sample 0 of the next
    request.
    """
    engine = engine_of(small_model())
    four = generate(engine, request(n=4, seed=7))[0]
    assert generate(engine, request(n=2, seed=7))[0] == four[:2]
    assert (
        len({sample.token_ids for sample in (*four, *generate(engine, request(n=4, seed=8))[0])})
        == 8
    )


def test_a_cache_too_small_for_all_changes_nothing(monkeypatch):
    model = small_model(scale=2.0)
    requests = [
        request(id=i, prompt=prompt, n=2, seed=i, max_new_tokens=150)
        for i, prompt in enumerate(random_prompts(6, longest=60))
    ]
    expected = generate(engine_of(model), *requests)
    small = engine_of(
        model, engine={"kv_cache_memory_bytes": 17 * 2 * 2 * 2 * 32 * 32 * 4}
    )  # 17 blocks: two long sequences and a bit
    scheduler, dropped = small._llm.engine_core.engine_core.scheduler, []
    drop = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda *args, **kwargs: dropped.append(1) or drop(*args, **kwargs),
    )
    assert generate(small, *requests) == expected
    assert dropped


@pytest.mark.parametrize("tied", [True, False])
def test_no_token_outside_the_vocabulary_is_sampled(tied):
    """Inside, 42 tokens are 64: the rest of the output layer is 0, which is likely where logits are
    small.
    """
    samples = generate(
        engine_of(small_model(tied=tied)), request(n=50, max_new_tokens=40, temperature=2.0)
    )[0]
    drawn = {token for sample in samples for token in sample.token_ids}
    assert len(drawn) > 30
    assert max(drawn) < 42


def test_requests_can_be_taken_back():
    model = small_model(scale=3.0)
    engine = engine_of(model, max_batch_size=2)
    requests = [request(id=i, n=2, prompt=prompt) for i, prompt in enumerate(random_prompts(4))]
    expected = generate(engine, *requests)
    before = engine.num_tokens
    engine.add(requests)
    engine.step()
    assert engine.recall([3, 0, 1, 9]) == [3, 1]
    assert engine.unfinished == 2
    assert engine.num_tokens == before + 2
    engine.abort([2, 9])
    assert run(engine) == {0: expected[0]}
    assert engine.step() == []
    assert generate(engine, *requests) == expected


def test_new_weights_end_what_is_under_way_and_what_was_cached():
    old, new = small_model(scale=3.0), small_model(seed=1, scale=3.0)
    engine = engine_of(old)
    before = generate(engine, request(prompt=LONG, temperature=0.0))[0][0]
    engine.add([request(prompt=LONG)])
    engine.begin_weights()
    assert (engine.unfinished, engine.usable) == (0, False)
    give(engine, new)
    assert engine.usable
    after = generate(engine, request(prompt=LONG, temperature=0.0))[0][0]
    assert list(before.token_ids) == greedy(old, LONG)
    assert list(after.token_ids) == greedy(new, LONG) != list(before.token_ids)


def test_a_cache_that_cannot_be_emptied_ends_an_update(monkeypatch):
    model = small_model(scale=3.0)
    engine = engine_of(model)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    engine.begin_weights()
    monkeypatch.setattr(engine._llm, "collective_rpc", lambda *args: None)
    with pytest.raises(RuntimeError, match="the engine's cache must be empty"):
        engine.finish_weights()
    assert not engine.usable


@pytest.mark.parametrize("emptied", [True, False])
def test_a_step_that_fails_in_a_replica_leaves_nothing_in_the_cache(monkeypatch, emptied):
    """vLLM counts the prompt as computed, and other ones with the same beginning would build on it."""
    engine, worker = engine_of(small_model(scale=3.0)), VLLMWorker()
    other, mine = request(prompt=LONG[::-1], temperature=0.0), request(prompt=LONG, temperature=0.0)
    expected = generate(engine, mine)
    engine._llm.reset_prefix_cache()
    generate(engine, other)
    with monkeypatch.context() as patched:
        patched.setattr(runner_of(engine), "execute_model", lambda *args: 1 / 0)
        if not emptied:
            patched.setattr(engine._llm, "reset_prefix_cache", lambda: False)
        engine.add([mine])
        worker._submitted = {mine.id}
        worker._step(engine)
    assert (engine.unfinished, worker._submitted, engine.usable) == (0, set(), emptied)
    assert isinstance(worker._error, ZeroDivisionError if emptied else RuntimeError)
    if emptied:
        for got, wanted in zip(generate(engine, mine)[0], expected[0], strict=True):
            assert got.token_ids == wanted.token_ids
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_what_is_not_finite_is_found_at_the_first_token_and_leaves_nothing():
    model = small_model(scale=3.0)
    engine = engine_of(model)
    requests = [
        request(id=i, prompt=prompt, max_new_tokens=100)
        for i, prompt in enumerate([LONG, LONG[3:40], [2]])
    ]
    expected = generate(engine, *requests)
    before = engine.num_tokens
    give(engine, model, float("nan"))
    with pytest.raises(FloatingPointError, match="weights hold NaN or infinity"):
        generate(engine, *requests)
    assert engine.unfinished == 0
    assert engine.num_tokens - before <= 3
    give(engine, model)
    assert generate(engine, *requests) == expected


def test_one_prompt_that_is_not_finite_does_not_change_the_answers_to_others():
    model = small_model(scale=3.0)
    with torch.no_grad():
        model.get_input_embeddings().weight[41] = float("inf")
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(posinf=0.0))
    model.config.tie_word_embeddings = False
    engine = engine_of(model)
    expected = generate(engine, request(prompt=LONG))
    with pytest.raises(FloatingPointError):
        generate(engine, request(prompt=[2, 41]))
    assert generate(engine, request(prompt=LONG)) == expected


def test_a_response_that_ended_otherwise_is_an_error():
    with pytest.raises(RuntimeError, match="the engine ended a response with 'abort'"):
        _finished(0, [_Tokens(finish_reason="abort")])


def test_two_processes_share_a_model(tmp_path, monkeypatch):
    """And need nothing of the folder that they were started from, even for stop strings."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = small_model(scale=3.0)
    engine = Engine(spec_of(model, num_replicas=1, tensor_parallel_size=2))
    try:
        assert not list(tmp_path.glob("nemorl-*"))
        give(engine, model)
        prompts = random_prompts(4)
        done = generate(
            engine,
            *[request(id=i, prompt=prompt, temperature=0.0) for i, prompt in enumerate(prompts)],
        )
        assert [list(done[i][0].token_ids) for i in range(4)] == [
            greedy(model, prompt) for prompt in prompts
        ]
        text = tiny_tokenizer().decode(done[0][0].token_ids)
        stopped = generate(
            engine, request(prompt=prompts[0], temperature=0.0, stop_strings=(text[2:4],))
        )[0][0]
        assert stopped.finish_reason == "stop"
        assert len(stopped.token_ids) < 8
    finally:
        engine.shutdown()
