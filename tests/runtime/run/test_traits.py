"""A backend of a third party says what it is and what it refuses, and works with everything."""

from dataclasses import replace
from pathlib import Path

import pytest

import nemorl
from nemorl.models.source import ModelSource
from nemorl.parallel import backends
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.plan import ParallelPlan, TrainingTraits
from nemorl.rollout.generation import Completion, GenerationTraits, Machine
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.run import registry
from nemorl.runtime.run.devices import Devices
from tests.runtime.runs import (
    addition_rows,
    digits,
    grpo_config,
    rows_file,
    saved_model,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model


def trained_by(name: str, plan: dict | None = None, **options) -> nemorl.SFTConfig:
    trainer = nemorl.TrainerConfig(backend=name, device="cpu", **options)
    runtime = nemorl.RuntimeConfig(oversubscribe=True) if plan else nemorl.RuntimeConfig()
    parallel = ParallelPlan(**plan or {})
    return nemorl.SFTConfig(trainer=trainer, parallel=parallel, runtime=runtime)


@pytest.mark.filterwarnings("ignore:parallel asks for")
def test_a_training_backend_says_what_it_can_do():
    class Silent(DTensorBackend):
        traits = TrainingTraits()
        check = None

    class Capable(DTensorBackend):
        traits = TrainingTraits(
            needs_ranks=True,
            pipelines=True,
            experts=("router_aux_loss_coef",),
            repeats_kv_heads=True,
        )
        check = None

    nemorl.register_training_backend("silent")(Silent)
    nemorl.register_training_backend("capable")(Capable)
    experts = tiny_model("qwen3_moe").config

    def devices(*given, **options) -> Devices:
        return Devices.of(trained_by(*given, **options), {}, num_gpus=0)

    assert not devices("silent").ranked and devices("capable").ranked
    for plan, message in (
        ({"pp": 2}, "parallel.pp 2 is for trainer.backend megatron"),
        ({"tp": 4}, "tp 4 does not divide the model's num_key_value_heads 2"),
    ):
        with pytest.raises(ValueError, match=message):
            devices("silent", plan).check_model(tiny_model(vocab_size=44).config)
        devices("capable", plan).check_model(tiny_model(vocab_size=44).config)
    replays = {"router_aux_loss_coef": 0.1}
    with pytest.raises(ValueError, match=r"aux_loss_coef needs .* dtensor or megatron"):
        devices("silent", **replays)
    devices("capable", **replays).check_model(experts)
    on_ranks = nemorl.GenerationConfig(backend="megatron")
    with pytest.raises(ValueError, match="unless the trainer's ranks can generate"):
        Devices.of(replace(trained_by("capable"), generation=on_ranks), {}, num_gpus=0)


def test_a_training_backend_checks_for_itself(tmp_path: Path):
    seen = []

    @nemorl.register_training_backend("careful")
    class Careful(DTensorBackend):
        @staticmethod
        def check(config, model, plan):
            seen.append((model and model.model_type, plan.num_ranks))
            if model is not None and model.vocab_size < 100:
                raise ValueError("careful needs a large vocabulary")

        def setup(self, config):
            raise AssertionError("too late")

    config = sft_config(tmp_path / "run", steps=1)
    config = replace(config, trainer=replace(config.trainer, backend="careful"))
    with pytest.raises(ValueError, match="careful needs a large vocabulary"):
        start(config)
    assert seen == [(None, 1), ("qwen2", 1)]
    found = backends.limits_of("careful")
    assert found.traits == DTensorBackend.traits


def test_what_a_backend_can_t_do_for_another_model_is_said_before_one_is_loaded(
    folder: Path, tmp_path: Path
):
    @nemorl.register_training_backend("plain")
    class Plain(DTensorBackend):
        traits = TrainingTraits()

        def setup(self, config):
            raise AssertionError("too late")

    @nemorl.register_training_backend("small")
    class Small:
        """Has a scalar head, but only the methods that all have."""

        traits = TrainingTraits(heads=("scalar", "lm"))

        def __init__(self, model=None): ...

        setup = train_step = get_logprobs = save_checkpoint = load_checkpoint = Plain.setup
        shutdown = DTensorBackend.shutdown

    config = grpo_config(tmp_path / "run", run={"async_save": True})
    config = replace(config, model=nemorl.ModelConfig(path=str(folder / "model")))
    model: dict = {"model": folder / "model"}
    head = r"head must be lm with trainer.backend plain, .* --trainer.backend dtensor or .*small"
    for name, options, message in (
        ("plain", {"head": "scalar", **model}, head),
        ("small", model, r"must have the method wait_for_checkpoint for run\.async_save"),
    ):
        mine = replace(config, trainer=replace(config.trainer, backend=name))
        with (
            pytest.raises(ValueError, match=message),
            nemorl.open_run(mine, train=addition_rows(4), reward=digits) as run,
        ):
            run.backend("second", **options)
        assert run.live is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"traits": {"experts": True}}, r"Odd.traits must be a TrainingTraits, .*write traits = "),
        ({"check": lambda config, model, plan: None}, r"Odd.check must be a static method, .*: d"),
        ({"traits": TrainingTraits(generates=True)}, "traits say generates must .* no open_engine"),
    ],
)
def test_a_wrong_description_is_refused_when_a_backend_is_registered(given, message):
    with pytest.raises(ValueError, match=message):
        nemorl.register_training_backend("odd")(type("Odd", (DTensorBackend,), given))
    assert "odd" not in registry.TRAINING_BACKENDS and "odd" not in backends.LIMITS


class Silent:
    """An engine of its own that never builds the model: it counts what it was sent."""

    traits = GenerationTraits(shares_model=False)

    def __init__(self, *, model, tokenizer, precision):
        assert isinstance(model, ModelSource)
        self.model, self.policy_version = model, 0

    def setup(self, config):
        self.size = self.model.config.vocab_size

    async def sample(self, prompt, params):
        if self.policy_version == 0:
            self.sent = [name for name, _ in self.model.weights()]
        answer = Completion(
            token_ids=(5,), logprobs=(-1.0,), finish_reason="length", text=f"{len(self.sent)}"
        )
        return [answer] * params.n

    def update_weights(self, weights, version, in_flight="keep"):
        self.sent, self.policy_version = [name for name, _ in weights], version

    def shutdown(self): ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_model(tmp_path / "model", scale=1.0)
    rows_file(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 3)
    return tmp_path


def test_an_engine_that_loads_for_itself_has_no_model_loaded(folder, monkeypatch):
    """Neither in eval nor in generate: configuration and tensors come from the files."""
    nemorl.register_generation_backend("silent")(Silent)

    def load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("nemorl.models.source.load_causal_lm", load)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    model, count = str(folder / "model"), len(dict(ModelSource(tiny_model()).weights()))
    found = nemorl.evaluate(model, str(folder / "rows.jsonl"), generation={"backend": "silent"})
    assert [answer["response"] for answer in found["answers"]] == [str(count)] * 3
    (answer,) = nemorl.generate(model=model, prompt="1+1=", backend="silent")
    assert answer["response"] == str(count)


@pytest.mark.slow
def test_a_generation_backend_checks_for_itself(folder: Path, tmp_path: Path):
    seen = []

    @nemorl.register_generation_backend("careful")
    class Careful(TorchGenerationBackend):
        traits = GenerationTraits(embedded=True)

        @staticmethod
        def check(config, model, machine):
            seen.append((config.max_batch_size, model and model.model_type, machine))
            if model is not None:
                raise ValueError("careful knows no such model")

    config = grpo_config(
        tmp_path / "run", steps=1, generation=nemorl.GenerationConfig(backend="careful")
    )
    with pytest.raises(ValueError, match="careful knows no such model"):
        start(config, reward=digits, train=addition_rows(4))
    assert [each[:2] for each in seen] == [(256, None), (256, "qwen2")]
    assert isinstance(seen[0][2], Machine)
    model, rows = str(folder / "model"), str(folder / "rows.jsonl")
    for use in (
        lambda: nemorl.evaluate(model, rows, generation={"backend": "careful"}),
        lambda: nemorl.generate(model, "1+1=", backend="careful"),
    ):
        with pytest.raises(ValueError, match="careful knows no such model"):
            use()
    assert len(seen) == 4


def test_an_error_in_a_check_names_the_backend(tmp_path: Path):
    def check(*_):
        raise KeyError("rope")

    options = {"check": staticmethod(check)}
    nemorl.register_training_backend("odd")(type("Odd", (DTensorBackend,), options))
    nemorl.register_generation_backend("odd")(type("Odd", (Silent,), options))
    config = grpo_config(tmp_path / "run", generation=nemorl.GenerationConfig(backend="odd"))
    with pytest.raises(KeyError) as caught:
        Devices.of(config, {}, num_gpus=0)
    assert caught.value.__notes__[0].startswith("in check() of the generation backend odd,")
    with pytest.raises(KeyError) as caught:
        Devices.of(trained_by("odd"), {}, num_gpus=0)
    assert caught.value.__notes__[0].startswith("in check() of the training backend Odd,")
