"""What models can do is proved, and a model that is broken on purpose is found."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor.parallel import RowwiseParallel
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3_moe import modeling_qwen3_moe

import nemorl
from nemorl.models import capabilities
from nemorl.models.capabilities import ASSUMED, CAPABILITIES, TESTED, Proof, keep, known
from nemorl.models.tiny import tiny_config, tiny_model
from nemorl.parallel import proving
from nemorl.parallel.config import BackendConfig, LoRAConfig, ModelConfig, TrainerConfig
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.dtensor.limits import settled
from nemorl.parallel.plan import ParallelPlan
from nemorl.parallel.proving import LIMIT, on_one_device, on_ranks
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
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


def adapted_by_two_ranks(families: list[str]) -> dict[str, float]:
    found = {}
    for family in families:
        model = tiny_model(tiny_config(generate_models.config_of(family)))
        for sequence_parallel in (True, False):
            plan = ParallelPlan(tp=2, param_dtype="float32", sequence_parallel=sequence_parallel)
            settings = proving._settings(TrainerConfig(device="cpu"), parallel=plan)
            worst = proving._adapted(model, proving.samples(160), settings)
            found[f"{family}, {sequence_parallel}"] = worst
    return found


@pytest.mark.slow
def test_adapters_follow_layers_that_are_whole_cut_or_gathered():
    """Trained with tensor parallelism, merged, and computed by transformers."""
    families = ["Llama 3", "Phi 3, 4", "OLMo 2", "Qwen 3 MoE", "DeepSeek V3"]
    worst = run_ranks(2, adapted_by_two_ranks, families)[0]
    assert all(each < LIMIT for each in worst.values()), worst


@pytest.mark.slow
def test_the_whole_table_is_what_two_ranks_prove():
    for family, found in run_ranks(2, found_on_ranks, list(FAMILIES))[0].items():
        assert not differs_from_the_table(family, found), family


def test_the_table_has_as_many_as_are_promised():
    assert sum(each["packed"]["holds"] for each in TABLE.values()) >= 14
    assert sum(each["tp"]["holds"] for each in TABLE.values()) >= 9
    for name in ("alone", "fsdp", "export", "head", "recompute"):
        assert all(each[name]["holds"] for each in TABLE.values()), name


def broken(kind: str, place: Any, **changed: Any) -> dict[Any, Proof]:
    with patch.multiple(place, **changed):
        return on_one_device(tiny_config(CONFIG_MAPPING[kind]()))


def ours(module: Any) -> bool:
    return module.config._attn_implementation != "eager"


@pytest.mark.slow
def test_a_window_that_is_ignored_is_found():
    plain = modeling_mistral.MistralAttention.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        before = self.config.sliding_window
        self.config.sliding_window = None if ours(self) else before
        try:
            return plain(self, *args, **options)
        finally:
            self.config.sliding_window = before

    found = broken("mistral", modeling_mistral.MistralAttention, forward=forward)
    assert not found["alone"].holds and found["alone"].worst and found["alone"].worst > 0.01


@pytest.mark.slow
def test_a_cap_that_is_dropped_is_found():
    plain = modeling_gemma2.Gemma2Attention.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        with patch.object(self, "attn_logit_softcapping", None if ours(self) else 1.0):
            return plain(self, *args, **options)

    assert not broken("gemma2", modeling_gemma2.Gemma2Attention, forward=forward)["alone"].holds


def test_a_layer_that_leaks_over_segments_is_found_where_it_does():
    plain = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + 0.5 * torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))

    found = broken("llama", modeling_llama.LlamaMLP, forward=forward)
    leaks = {name for name, proof in found.items() if not proof.holds}
    assert leaks == {"left_padded", "packed", "shared_prompts", "cached"}


@pytest.mark.slow
def test_a_router_in_half_precision_is_found():
    plain = modeling_qwen3_moe.Qwen3MoeTopKRouter.forward
    calls = iter(range(10**6))

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        if next(calls) < 16:  # of transformers' own pass: two layers, four rows, twice
            return plain(self, hidden)
        logits, scores, indices = plain(self, hidden.bfloat16().float())
        return logits, scores, indices

    found = broken("qwen3_moe", modeling_qwen3_moe.Qwen3MoeTopKRouter, forward=forward)
    assert not found["alone"].holds


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
    late = CONFIG_MAPPING["qwen2"](use_sliding_window=True, max_window_layers=3)
    assert tiny_config(late).layer_types == ["full_attention"] * 3 + ["sliding_attention"]
    late = CONFIG_MAPPING["qwen2"](use_sliding_window=True, max_window_layers=20)
    assert tiny_config(late).layer_types == ["full_attention", "sliding_attention"]
    late = CONFIG_MAPPING["deepseek_v3"](first_k_dense_replace=20)  # a number says it
    with pytest.raises(ValueError, match="must show all kinds in the first 16, or list the kind"):
        tiny_config(late)
    config = tiny_config(CONFIG_MAPPING["qwen3"]())
    one, other = (tiny_model(config).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_type_that_computes_otherwise_is_found():
    """GPT-2 has positions of its own, and other names."""
    found = on_one_device(tiny_config(CONFIG_MAPPING["gpt2"](n_layer=3)))
    assert found["alone"].holds and found["packed"].holds
    with pytest.raises(
        ValueError, match="decoder must have a list of layers, but it is 'BertModel'"
    ):
        tiny_config(CONFIG_MAPPING["bert"]())


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
        ({"parallel": ParallelPlan(cp=2)}, "cp", "parallel.cp must be off"),
        ({"parallel": ParallelPlan(dp_shard=2)}, "fsdp", "parallel must be off"),
        ({"lora": LoRAConfig(rank=4)}, "lora", "lora.rank must be off"),
        (
            {"parallel": ParallelPlan(activation_checkpointing="full")},
            "recompute",
            "parallel.activation_checkpointing must be off",
        ),
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


def test_the_table_is_for_the_versions_that_it_was_tested_with(cache: Path, monkeypatch):
    config = CONFIG_MAPPING["llama"]()
    assert known(config) is not None
    own = capabilities.versions_here()
    monkeypatch.setattr(capabilities, "versions_here", lambda: {**own, "peft": ""})
    assert known(config) is not None  # it is not installed
    monkeypatch.setattr(capabilities, "versions_here", lambda: {**own, "transformers": "5.18.0"})
    assert known(config) is None


def test_ranks_that_end_without_an_answer_are_an_error(monkeypatch):
    command = [sys.executable, "-c", "import sys; sys.exit('out of memory')"]

    def start(folder: Path, *, trust: bool) -> list[subprocess.Popen[bytes]]:
        with (folder / "rank0.log").open("wb") as log:
            return [subprocess.Popen(command, stderr=log)]

    monkeypatch.setattr(proving, "_start_ranks", start)
    with pytest.raises(RuntimeError, match=r"two processes .* no result \(out of memory\)"):
        proving.prove(CONFIG_MAPPING["llama"]())


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
    """Write a tiny model of a type with the tests' tokenizer."""
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
    ("kind", "options", "message"),
    [
        ("t5", {}, "the model's type must have a causal language model .*, but it is 't5'"),
        (
            "qwen2_vl",
            {},
            "the model must be of text alone, but it is 'qwen2_vl with vision_config'",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "the model's weights must not be quantized, but it is 'gptq'",
        ),
    ],
)
def test_what_can_not_be_trained_is_refused_by_name(kind, options, message, tmp_path, capsys):
    from nemorl.runtime.cli.main import main

    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)
    assert main(["models", "check", str(tmp_path)]) == 2
    assert message.split(".*")[0] in capsys.readouterr().err
    with pytest.raises(ValueError, match=message):
        DTensorBackend().setup(BackendConfig(model=ModelConfig(path=str(tmp_path))))


def test_the_command_shows_what_holds_and_why_not(tmp_path: Path, cache: Path, capsys, monkeypatch):
    from nemorl.runtime.cli.main import main

    found = {name: replace(proof, worst=2e-6) for name, proof in proofs("cp").items()}
    monkeypatch.setattr(proving, "prove", lambda config: found)
    trained_model("llama").config.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        assert main(["models", "check", str(name)]) == 0
        shown = capsys.readouterr().out
        assert "packed rows" in shown and "2e-06" in shown and "numbers differ by 0.5" in shown
    assert shown.count("yes") == len(CAPABILITIES) - 1 and shown.count("no ") >= 1
    monkeypatch.setattr(proving, "prove", lambda config: proofs("alone"))
    assert main(["models", "check", str(tmp_path)]) == 2
    assert "must be trained elsewhere" in capsys.readouterr().err
