"""Algorithms and backends by name, and those that others add."""

from dataclasses import dataclass

import pytest

import nemorl
from nemorl.parallel.backend import TrainingTraits, check_training_backend
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.rollout.user_code import check_function, function_of
from nemorl.runtime.run import registry


@dataclass(frozen=True, kw_only=True)
class MyConfig(nemorl.BaseConfig):
    """An algorithm of one's own."""


def loop(run: nemorl.Run) -> None:
    raise NotImplementedError


def test_a_backend_without_a_method_is_refused_when_it_registers():
    class Half:
        def setup(self, config): ...

        def generate(self, prompts, sampling_params): ...

    with pytest.raises(ValueError, match=r"generation backend .* Half has no update_weights, shut"):
        nemorl.register_generation_backend("half")(Half)
    with pytest.raises(ValueError, match=r"a training backend .* but Half has no train_step, get_"):
        nemorl.register_training_backend("half")(Half)

    class Generating(DTensorBackend):
        traits = TrainingTraits(generates=True)

    with pytest.raises(ValueError, match=r"says? generates .* has no open_engine, decode, take_w"):
        nemorl.register_training_backend("half")(Generating)
    Generating.open_engine = Generating.decode = Generating.take_weights = loop
    check_training_backend(Generating)
    assert "half" not in {**registry.GENERATION_BACKENDS, **registry.TRAINING_BACKENDS}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nemorl.register_algorithm("mine", config=nemorl.GRPOConfig),
            "config must belong to one algorithm, but GRPOConfig belongs to 'grpo': derive",
        ),
        (
            lambda: nemorl.run(MyConfig()),
            r"config must be of a registered algorithm \(sft, .* is 'MyConfig'",
        ),
    ],
)
def test_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_file_of_the_user_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lacking.py").write_text("import no_such_module\nreward = len\n")
    check_function("lacking.py:reward", "reward")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        function_of("lacking.py:reward", "reward")
