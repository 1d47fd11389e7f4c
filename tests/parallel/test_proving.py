"""What models can do is proved, and a model that is broken on purpose is found."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor.parallel import RowwiseParallel
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.llama import modeling_llama

import nemorl
from nemorl.models import capabilities
from nemorl.models.capabilities import ASSUMED, CAPABILITIES, TESTED, Proof, keep, known
from nemorl.models.tiny import tiny_config, tiny_model
from nemorl.parallel import proving
from nemorl.parallel.config import BackendConfig, LoRAConfig, TrainerConfig
from nemorl.parallel.dtensor import pieces
from nemorl.parallel.dtensor.limits import settled
from nemorl.parallel.dtensor.lora import write_adapter_config
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.proving import LIMIT, on_one_device, on_ranks
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.cli.main import main
from tests.ranks import run_ranks
from tests.tiny_models import tiny_model as trained_model
from tests.tiny_models import tiny_tokenizer

SCRIPT = Path(__file__).parents[2] / "docs" / "generate_models.py"
spec = importlib.util.spec_from_file_location("generate_models", SCRIPT)
assert spec is not None and spec.loader is not None
generate_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate_models)
FAMILIES = generate_models.FAMILIES
TABLE = json.loads(TESTED.read_bytes())["types"]


def found_on_ranks(families: list[str]) -> dict[str, Any]:
    return {one: on_ranks(tiny_config(generate_models.config_of(one))) for one in families}


def differs_from_the_table(family: str, found: dict[Any, Proof]) -> list[str]:
    table = TABLE[FAMILIES[family][0]]
    return [
        f"{name}: {proof}" for name, proof in found.items() if proof.holds != table[name]["holds"]
    ]


OFTEN = ("Llama 3", "Gemma 2", "Phi 3, 4", "Qwen 3 MoE")


@pytest.mark.parametrize(
    "family", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_the_table_is_what_one_device_proves(family: str):
    found = on_one_device(tiny_config(generate_models.config_of(family)))
    assert not differs_from_the_table(family, found)
    assert all(
        proof.worst is not None and proof.worst <= LIMIT for proof in found.values() if proof.holds
    )


@pytest.mark.slow
def test_the_whole_table_is_what_two_ranks_prove():
    for family, found in run_ranks(2, found_on_ranks, list(FAMILIES))[0].items():
        assert not differs_from_the_table(family, found), family


def test_the_table_has_as_many_as_are_promised():
    assert sum(each["packed"]["holds"] for each in TABLE.values()) >= 14
    assert sum(each["tp"]["holds"] for each in TABLE.values()) >= 9
    for name in ("alone", "fsdp", "export", "head", "recompute"):
        assert all(each[name]["holds"] for each in TABLE.values()), name
    assert f"{len(TABLE)} types" in Path("README.md").read_text()


def broken(kind: str, place: Any, **changed: Any) -> dict[Any, Proof]:
    with patch.multiple(place, **changed):
        return on_one_device(tiny_config(CONFIG_MAPPING[kind]()))


def test_a_layer_that_leaks_over_segments_is_found_where_it_does():
    plain = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + 0.5 * torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))

    found = broken("llama", modeling_llama.LlamaMLP, forward=forward)
    leaks = {name for name, proof in found.items() if not proof.holds}
    assert leaks == {"left_padded", "packed", "shared_prompts", "cached"}


def test_an_adapter_that_peft_reads_otherwise_is_found():
    def write(model: Any, folder: Path) -> None:
        write_adapter_config(model, folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 16}))

    found = broken("llama", pieces, write_adapter_config=write)
    assert [name for name, proof in found.items() if not proof.holds] == ["lora"]


def with_a_bias_twice() -> dict[Any, Proof]:
    plain = RowwiseParallel._prepare_output_fn

    def twice(layouts: Any, local: Any, module: Any, outputs: Any, mesh: Any) -> Any:
        if getattr(module, "bias", None) is not None:
            outputs = outputs + module.bias
        return plain(layouts, local, module, outputs, mesh)

    with patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(twice)):
        return on_ranks(tiny_config(CONFIG_MAPPING["llama"](attention_bias=True)))


@pytest.mark.slow
def test_a_bias_that_tensor_parallelism_adds_twice_is_found():
    found = run_ranks(2, with_a_bias_twice)[0]
    assert not found["tp"].holds and found["fsdp"].holds and found["cp"].holds


def test_tiny_models_have_every_kind_of_layer():
    for kind, count in (("gemma3_text", 6), ("deepseek_v3", 4), ("nemotron_h", 4), ("llama", 2)):
        assert tiny_config(CONFIG_MAPPING[kind]()).num_hidden_layers == count
    late = CONFIG_MAPPING["qwen2"](use_sliding_window=True, max_window_layers=20)
    assert tiny_config(late).layer_types == ["full_attention", "sliding_attention"]
    config = tiny_config(CONFIG_MAPPING["qwen3"]())
    one, other = (tiny_model(config).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def proofs(*failing: str) -> dict[Any, Proof]:
    return {
        name: Proof(False, 0.5, "numbers differ by 0.5") if name in failing else proof
        for name, proof in ASSUMED.items()
    }


def test_what_is_not_proved_is_not_used():
    trainer = TrainerConfig(sequence_packing=True, packed_row_tokens=64)
    config = BackendConfig(trainer=trainer)
    assert settled(config, "one", proofs()) == config
    with pytest.warns(
        UserWarning, match=r"with one rows are not packed \(numbers differ by 0.5\), "
    ):
        found = settled(config, "one", proofs("packed", "shared_prompts", "padded"))
    assert found.trainer == TrainerConfig(share_prompts=False, train_micro_batch_size=1)
    with pytest.raises(ValueError, match=r"transformers here, but 'one' has not, even row"):
        settled(config, "one", proofs("alone"))
    for options, failing, field in (
        ({"parallel": ParallelPlan(tp=2)}, "tp", r"parallel.tp must be off for one \(numbers"),
        ({"lora": LoRAConfig(rank=4)}, "lora", "lora.rank must be off"),
    ):
        with pytest.raises(ValueError, match=field):
            settled(replace(config, **options), "one", proofs(failing))
        settled(replace(config, **options), "one", proofs())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def test_a_check_is_kept_by_configuration_and_versions(cache: Path, monkeypatch):
    config = CONFIG_MAPPING["olmo3"]()
    assert known(config) is None
    keep(config, proofs("tp"))
    found = known(config)
    assert found == proofs("tp")
    assert known(CONFIG_MAPPING["olmo3"](sliding_window=7)) is None
    monkeypatch.setattr(capabilities, "_version", lambda package: "0.0")
    assert known(config) is None


@pytest.mark.slow
def test_sampling_without_a_cache_gives_the_models_own_logprobs():
    config = tiny_config(CONFIG_MAPPING["qwen3_next"]())
    model = tiny_model(config)
    engine = TorchGenerationBackend(model=model)
    with pytest.warns(
        UserWarning, match=r"qwen3_next is sampled from without a cache \(.*cache wi"
    ):
        engine.setup(GenerationConfig(max_batch_size=3))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    params = SamplingParams(n=2, max_new_tokens=9, ignore_eos=True, seed=1)
    answers = engine.generate(prompts, params)
    for index, answer in enumerate(answers):
        ids = torch.tensor([[*prompts[index // 2], *answer.token_ids]])
        with torch.no_grad():
            every = model(ids, use_cache=False).logits[0].log_softmax(-1)
        start = len(prompts[index // 2])
        own = every[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), own, atol=1e-5, rtol=0)


def folder_of(kind: str, path: Path) -> str:
    tokenizer = tiny_tokenizer()
    config = tiny_config(CONFIG_MAPPING[kind]())
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 256
    tiny_model(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.slow
def test_a_run_checks_a_type_that_is_not_in_the_table_once(tmp_path: Path, cache: Path, capfd):
    folder = folder_of("olmo3", tmp_path / "model")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    options: dict[str, Any] = {
        **{"max_num_steps": 1, "num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        **{"generation.max_new_tokens": 3, "data.max_total_sequence_length": 32},
    }
    for number in range(2):
        nemorl.train(folder, rows, lambda prompt, response: len(response) % 2, **options)
        said = "checking what olmo3 can do here, for this and later runs"
        assert (said in capfd.readouterr().err) == (number == 0)
    (kept,) = (cache / "nemorl" / "models").iterdir()
    assert json.loads(kept.read_bytes())["packed"]["holds"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", "the model's type must have a causal language model in transformers, but it is 't5"),
        ("qwen2_vl", "the model must be of text alone, but it is 'qwen2_vl with vision_config'"),
    ],
)
def test_what_can_not_be_trained_is_refused_by_name(kind, message, tmp_path, capsys):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    assert main(["models", "check", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_shows_what_holds_and_why_not(tmp_path: Path, cache: Path, capsys, monkeypatch):
    found = {name: replace(proof, worst=2e-6) for name, proof in proofs("cp").items()}
    monkeypatch.setattr(proving, "prove", lambda config: found)
    trained_model("llama").config.save_pretrained(tmp_path)
    assert main(["models", "check", str(tmp_path / "config.json")]) == 0
    shown = capsys.readouterr().out
    assert "packed rows" in shown and "2e-06" in shown and "numbers differ by 0.5" in shown
    assert shown.count("yes") == len(CAPABILITIES) - 1 and shown.count("no ") >= 1
    monkeypatch.setattr(proving, "prove", lambda config: proofs("alone"))
    assert main(["models", "check", str(tmp_path)]) == 2
    assert "must be trained elsewhere" in capsys.readouterr().err
