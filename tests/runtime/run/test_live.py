"""A run around a model on ranks, which are stand-ins here, and how it goes on when they die."""

import json
import random
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

import nemorl
from nemorl.models.source import ModelSource
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.config import TRAITS
from nemorl.rollout.generation import GenerationTraits
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run import devices, parts, registry
from nemorl.runtime.store.files import WorkerTimeout
from nemorl.runtime.watch.callbacks import Callback
from tests.parallel.offloaded import held
from tests.rollout.updates import update
from tests.runtime import runs
from tests.runtime.ranks.fake_ranks import FakeRanks, killed
from tests.runtime.run.mishaps import rollout_threads
from tests.runtime.runs import addition_rows, digits, grpo_config, numbers, saved_model, sft_config
from tests.tiny_models import KINDS, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with end tokens of its own."""
    model = tiny_model(scale=2.0)
    model.generation_config = GenerationConfig(eos_token_id=[1, 5])
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ranks are `FakeRanks`, all of whom are remembered; `deaths` are of all of them together."""
    made: dict[str, Any] = {"deaths": {}, "all": []}

    def make(config, backend, plan, log_dir, engines):
        made["all"].append(FakeRanks(made["deaths"]))
        return made["all"][-1]

    monkeypatch.setattr(parts, "make_trainer", make)
    return made


def on_ranks(config: Any, folder: Path, **runtime: Any) -> Any:
    data, model = replace(config.data, train=None), nemorl.ModelConfig(path=str(folder))
    return replace(
        config,
        model=model,
        data=data,
        parallel=nemorl.ParallelPlan(cpu_offload=True),  # which takes a rank
        runtime=nemorl.RuntimeConfig(**runtime),
    )


def alone(config: Any) -> Any:
    return replace(
        config,
        parallel=nemorl.ParallelPlan(),
        runtime=nemorl.RuntimeConfig(),
        run=replace(config.run, dir=f"{config.run.dir}-alone"),
    )


def go(config: Any, *, reward: Any = digits, **options: Any) -> nemorl.TrainResult:
    reward = {} if isinstance(config, nemorl.SFTConfig) else {"reward": reward}
    return nemorl.run(
        config, train=addition_rows(), validation=addition_rows(8), **reward, **options
    )


@pytest.mark.parametrize("make", [grpo_config, sft_config])
def test_the_same_numbers_as_in_one_process(make, folder, ranks, tmp_path: Path):
    config = on_ranks(
        make(tmp_path / "run", steps=3, run={"export": True, "val_period": 2}), folder
    )
    spread, whole = go(config), go(alone(config))
    assert list(map(numbers, spread.history)) == list(map(numbers, whole.history))
    assert spread.model is None and whole.model is not None
    exported = AutoModelForCausalLM.from_pretrained(spread.paths.hf)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], weight), name
    assert GenerationConfig.from_pretrained(spread.paths.hf).eos_token_id == [1, 5]
    assert [one.ended for one in ranks["all"]] == [True]


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_kernels_where_the_engine_computes_too(
    deterministic, folder, ranks, tmp_path: Path, monkeypatch
):
    """Though the ranks are other processes, as those stand-ins are made to be."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("nemorl.parallel.accumulation.deterministic_kernels", nullcontext())
    found = []
    step = TorchGenerationBackend._step

    def watched(self, *args):
        found.append(torch.are_deterministic_algorithms_enabled())
        return step(self, *args)

    monkeypatch.setattr(TorchGenerationBackend, "_step", watched)
    config = on_ranks(grpo_config(tmp_path / "run", steps=1), folder)
    go(replace(config, trainer=replace(config.trainer, deterministic=deterministic)))
    assert found and set(found) == {deterministic}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow_cases("adapter")
@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapters_on_ranks(export, folder, ranks, tmp_path: Path):
    """The copy that generates has them merged, which is another order of the same sums."""
    lora = nemorl.LoRAConfig(rank=2, export=export)
    config = on_ranks(
        grpo_config(tmp_path / "run", steps=2, run={"export": True}, lora=lora), folder
    )
    spread, whole = go(config), go(alone(config))
    for line, other in zip(spread.history, whole.history, strict=True):
        assert numbers(line) == pytest.approx(numbers(other), abs=1e-5)
    files = {path.name for path in spread.paths.hf.iterdir()}
    assert files == {path.name for path in whole.paths.hf.iterdir()}
    for path in spread.paths.hf.glob("*.safetensors"):
        tensors, others = load_file(path), load_file(whole.paths.hf / path.name)
        assert tensors.keys() == others.keys()
        for name in tensors:
            torch.testing.assert_close(tensors[name], others[name], rtol=0, atol=1e-6)


class Seen(Callback):
    """The steps that a callback of the user's is told of, over all attempts."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begun = self.closed = 0

    def on_train_begin(self, trainer) -> None:
        assert not self.closed
        self.begun += 1

    def on_step_end(self, trainer, step, metrics) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("make", [grpo_config, sft_config])
def test_ranks_that_die_cost_no_number(make, folder, ranks, tmp_path: Path):
    """The first death is in step 4, the second in the second step of the next go."""
    config = on_ranks(
        make(tmp_path / "run", steps=6, run={"save_period": 2, "val_period": 3}),
        folder,
        max_restarts=2,
    )
    straight = go(alone(config))
    ranks["deaths"][("train_step", 4)] = killed
    seen, hang = Seen(), WorkerTimeout("no answer to train_step within 9 s from rank 0")
    with pytest.warns(UserWarning) as caught:
        result = go(config, callbacks=[seen, Arm(ranks["deaths"], lambda: hang)])
    told = [str(w.message) for w in caught if "with new ranks" in str(w.message)]
    assert len(told) == 2
    again = r"the run restarts from .*step_2 with new ranks \(restart 1 of 2\): rank 1 .* died in"
    assert re.match(rf"{again} step 3: it was killed", told[0])
    assert list(map(numbers, result.history)) == list(map(numbers, straight.history))
    assert seen.steps == [1, 2, 3, 3, 3, 4, 5, 6] and (seen.begun, seen.closed) == (3, 1)
    assert [one.ended for one in ranks["all"]] == [True] * 3
    assert json.loads(result.paths.record.read_text())["status"] == "finished"
    assert nemorl.load_config(type(config), result.paths.config).run.resume is False


def test_lost_ranks_lose_no_prompt_that_is_sampled_ahead(folder, ranks, tmp_path: Path):
    """Groups in flight end with the ranks, and are drawn again of the same prompts."""
    config = grpo_config(
        tmp_path / "run",
        steps=6,
        run={"save_period": 2},
        async_=nemorl.AsyncConfig(max_staleness=2),
    )
    ranks["deaths"][("train_step", 4)] = killed
    before = rollout_threads()
    with pytest.warns(UserWarning, match="with new ranks"):
        go(on_ranks(config, folder, max_restarts=1))
    lines = runs.lines(tmp_path / "run")
    assert [number for line in lines for number in line["trained"]] == [*range(36)]
    assert rollout_threads() <= before


class Arm(Callback):
    """Once the run has started again, its second step is deadly, too."""

    def __init__(self, deaths: dict, death: Any) -> None:
        self.deaths, self.death, self.begun = deaths, death, 0

    def on_train_begin(self, trainer) -> None:
        self.begun += 1
        if self.begun == 2:
            self.deaths[("train_step", 2)] = self.death


@pytest.mark.parametrize(
    ("death", "max_restarts", "message"),
    [(killed, 0, "died in step 3"), (lambda: RuntimeError("a bug"), 3, "a bug")],
)
def test_no_restart_without_a_reason(death, max_restarts, message, folder, ranks, tmp_path: Path):
    ranks["deaths"] |= {("train_step", 2): death}
    with pytest.raises((ChildProcessError, RuntimeError), match=message):
        go(on_ranks(sft_config(tmp_path / "run"), folder, max_restarts=max_restarts))
    assert len(ranks["all"]) == 1


@pytest.mark.slow_cases("when2")
@pytest.mark.parametrize(
    "when", [("setup", 1), ("train_step", 2), ("save_checkpoint", 1), ("get_logprobs", 1)]
)
def test_a_death_before_the_first_checkpoint(when, folder, ranks, tmp_path: Path):
    """The run starts again, also with the random numbers that its reward draws."""
    np.random.seed(5)
    config = on_ranks(
        grpo_config(tmp_path / "run", steps=3, run={"save_period": 3}), folder, max_restarts=1
    )

    def noisy(prompt: str, response: str) -> float:
        return digits(prompt, response) + np.random.random() + float(torch.rand(()))

    straight = go(alone(config), reward=noisy)
    np.random.seed(5)
    ranks["deaths"][when] = killed
    message = "the run starts again, without a checkpoint yet, with new ranks"
    with pytest.warns(UserWarning, match=message):
        result = go(config, reward=noisy)
    assert list(map(numbers, result.history)) == list(map(numbers, straight.history))


def test_another_number_of_ranks_keeps_the_order_of_the_data(folder, ranks, tmp_path: Path):
    config = on_ranks(
        sft_config(tmp_path / "run", steps=2, run={"val_period": 2}), folder, timeout_s=100
    )
    straight = go(replace(alone(config), max_num_steps=4))
    go(config)
    plan = nemorl.ParallelPlan(dp_shard=2, cpu_offload=True)
    again = runs.resumed(config, max_num_steps=4, parallel=plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = go(replace(again, runtime=nemorl.RuntimeConfig(timeout_s=50)))
    told = [str(w.message) for w in caught if "changed settings" in str(w.message)]
    assert told == ["the run continues with changed settings: parallel.dp_shard is 2, was None"]
    assert list(map(numbers, result.history)) == list(map(numbers, straight.history))


def source_of_engines(*, gpus: int, engine: str = "torch", **trainer: Any) -> ModelSource:
    """As of a run with four ranks in bfloat16, whose model is not here."""
    config = nemorl.GRPOConfig(
        parallel=nemorl.ParallelPlan(tp=4, param_dtype="bfloat16"),
        generation=nemorl.GenerationConfig(backend=engine),
        trainer=nemorl.TrainerConfig(**trainer),
    )
    with torch.device("meta"):
        model = tiny_model(num_hidden_layers=16, hidden_size=1024, intermediate_size=2048)
    found = devices.Devices.of(config, {}, num_gpus=gpus)
    return parts.engine_source(found, TRAITS[engine], model)


@pytest.mark.parametrize(
    ("given", "device"),
    [
        pytest.param({"gpus": 5}, "cuda:4", id="a GPU is free"),
        pytest.param({"gpus": 5, "device": "cpu"}, "cpu", id="the ranks are on CPUs"),
        pytest.param({"gpus": 4, "engine": "vllm"}, None, id="no copy is made"),
    ],
)
def test_the_copy_of_a_model_on_ranks_is_beside_no_rank(given, device, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = source_of_engines(**given)
    assert (source._device, source._dtype) == (device, torch.bfloat16)


def test_the_copy_is_in_the_type_that_ranks_compute_in(folder, ranks, tmp_path: Path, monkeypatch):
    """Its receipts and its agreement with the trainer hold."""
    setup, found = TorchGenerationBackend.setup, set()

    def watched(self, config):
        setup(self, config)
        found.update(each.dtype for each in self.model.parameters())

    monkeypatch.setattr(TorchGenerationBackend, "setup", watched)
    config = on_ranks(grpo_config(tmp_path / "run", steps=2), folder)
    go(replace(config, parallel=replace(config.parallel, param_dtype="bfloat16")))
    assert found == {torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", [k if n < 2 else pytest.param(k, marks=pytest.mark.slow) for n, k in enumerate(KINDS)]
)
def test_a_replica_is_the_model(kind, tied):
    model = tiny_model(kind, tied=tied)
    with torch.device("meta"):
        far = AutoModelForCausalLM.from_config(model.config)
    before = torch.get_rng_state()
    replica = ModelSource(far, device="cpu").load()
    assert torch.equal(torch.get_rng_state(), before)
    generator = nemorl.get_generation_backend("torch")(model=replica, tokenizer=tiny_tokenizer())
    generator.setup(nemorl.GenerationConfig(max_new_tokens=4))
    once = {id(tensor): (name, tensor.detach()) for name, tensor in model.named_parameters()}
    update(generator, iter(once.values()), 1)
    ids = torch.arange(2, 12)[None]
    assert torch.equal(replica(ids).logits, model(ids).logits)
    assert not any(parameter.requires_grad for parameter in replica.parameters())


def test_the_seed_is_that_of_every_generator(tmp_path: Path):
    def drawn(name: str, seed: int = 0) -> list[float]:
        def reward(response):
            return random.random() + float(np.random.random()) + float(torch.rand(()))

        config = grpo_config(tmp_path / name, steps=2, run={"seed": seed})
        result = runs.start(config, reward=reward)
        return [line["reward"] for line in result.history]

    first = drawn("first")
    random.seed(5)
    np.random.seed(5)
    assert drawn("second") == first != drawn("third", seed=1)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, int]]]:
    """What is on the devices of all backends each time that something is generated."""
    backends: list[DTensorBackend] = []
    found: list[list[dict[str, int]]] = []
    set_up, step = DTensorBackend.setup, TorchGenerationBackend._step

    def setup(self, config):
        backends.append(self)
        set_up(self, config)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()  # in place of a file's mapped memory

    def watched(self, new, dropped):
        if new:
            found.append([held(backend) for backend in backends if backend._model is not None])
        step(self, new, dropped)

    monkeypatch.setattr(DTensorBackend, "setup", setup)
    monkeypatch.setattr(TorchGenerationBackend, "_step", watched)
    monkeypatch.setattr(devices, "_num_gpus", lambda *_: 1)
    return found


NOTHING = {"parameters": 0, "gradients": 0, "optimizer": 0, "reference": 0}


@pytest.mark.parametrize("ranked", [False, True])
def test_what_generation_does_not_need_is_offloaded_meanwhile(
    ranked: bool, folder, ranks, tmp_path: Path, watched
):
    """All of it where the engine has weights of its own, as beside ranks."""
    found = []
    for offloads in (True, False):
        options = {"kl": nemorl.KLConfig(coef=0.1), "run": {"val_period": 1, "async_save": True}}
        config = replace(
            grpo_config(tmp_path / str(offloads), steps=2, **options),
            model=nemorl.ModelConfig(path=str(folder)),
            parallel=nemorl.ParallelPlan(
                activation_checkpointing="selective" if ranked else "none"
            ),
            trainer=nemorl.TrainerConfig(offload_during_generation=offloads),
        )
        found.append(go(config))
        if offloads:
            sizes = [only for (only,) in watched]
            assert len(sizes) == 5  # the probe, two steps, two validations
            kept = NOTHING if ranked else {**NOTHING, "parameters": sizes[0]["parameters"]}
            assert all(size == kept for size in sizes) and bool(kept["parameters"]) != ranked
    one, other = (list(map(numbers, each.history)) for each in found)
    assert one == other


def test_other_models_are_offloaded_too(folder, tmp_path: Path, watched):
    trainer = nemorl.TrainerConfig(offload_during_generation=True)
    config = grpo_config(tmp_path / "run", steps=1, trainer=trainer)
    config = replace(config, model=nemorl.ModelConfig(path=str(folder)))
    with nemorl.open_run(config, train=addition_rows(), reward=digits) as run:
        prompts = run.prompts()
        early = run.backend("early", model=folder, trains=False)
        critic = run.backend("critic", model=folder)
        for step in run.steps(1):
            late = run.backend("late", trains=False)
            step.sample(prompts, count=2)
            assert held(early) == held(late) == held(critic) == NOTHING
    probe, sample = watched
    assert probe[0] == NOTHING and sample[0] == sample[2] == NOTHING


def test_routers_replay_what_an_engine_has_recorded(tmp_path: Path, ranks, monkeypatch):
    """A run that can't is refused before its ranks start."""
    monkeypatch.setitem(TRAITS, "forgetful", GenerationTraits(embedded=True))
    monkeypatch.setitem(registry.GENERATION_BACKENDS, "forgetful", TorchGenerationBackend)
    model = saved_model(tmp_path / "model", kind="mixtral", head_dim=32)
    config = on_ranks(grpo_config(tmp_path / "run"), model)
    trainer = nemorl.TrainerConfig(backend="megatron", device="cpu", router_replay=True)
    engines = nemorl.GenerationConfig(backend="forgetful", max_new_tokens=4)
    config = replace(config, trainer=trainer, parallel=nemorl.ParallelPlan(), generation=engines)
    with pytest.raises(ValueError, match=r"must record the experts .*, but it is 'forgetful'"):
        nemorl.run(config, train=addition_rows(), reward=digits)
    assert not ranks["all"]
