"""Whole runs on an emulated GPU: they equal the CPU's, mix no devices, and wait as often as
docs/performance.md says.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import nemorl
from nemorl.data.batch import TokenBatch
from nemorl.losses.logprobs import LogprobKind
from nemorl.losses.types import finalize
from nemorl.models.causal_lm import load_causal_lm
from nemorl.parallel.backend import LossFn
from nemorl.parallel.config import (
    BackendConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from nemorl.parallel.dtensor.backend import DTensorBackend
from nemorl.parallel.megatron.backend import MegatronBackend
from nemorl.parallel.megatron.engine import Engine, Order
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend
from nemorl.runtime.algorithms import policy_loss, preference_loss, sft
from nemorl.runtime.config.grpo import (
    CISPOLoss,
    ClippedLoss,
    GRPOConfig,
    GSPOLoss,
    KLConfig,
    OffPolicyConfig,
    ReinforceLoss,
)
from nemorl.runtime.run.callbacks import Callback
from tests.emulated_gpu import DEVICE, NAME, Emulated, Waits, counted, emulated, gpu
from tests.parallel.batches import nll_loss, random_batch
from tests.parallel.parity.cases import QUICK, REST, Case
from tests.parallel.parity.compare import verdict
from tests.parallel.parity.run import chunks, run_chunk
from tests.parallel.varlen import used_on_cpus
from tests.ranks import run_ranks
from tests.runtime.algorithms.pairs import CONFIGS
from tests.runtime.algorithms.pairs import random_batch as random_pairs
from tests.runtime.killed import assert_equal_outcomes, in_a_process
from tests.runtime.runs import (
    addition_rows,
    dpo_config,
    grpo_config,
    numbers,
    preference_rows,
    sft_config,
    start,
)
from tests.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.xdist_group("emulated")  # once torch has the device it keeps it
ROOT = Path(__file__).parent.parent
STEP = "an optimizer step, with its metrics"


def bound(what: str) -> int:
    """The number of waits that docs/performance.md promises."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(what)} \| (\d+) ", text, re.MULTILINE)
    assert found, what
    return int(found[1])


class TestTheDevice:
    """It must catch what it is for."""

    def test_it_computes_and_refuses_to_mix_devices(self):
        with emulated():
            ours = torch.arange(6.0, device=NAME).view(2, 3)
            assert (ours @ ours.t()).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]
            assert (ours * torch.tensor(2.0)).sum().item() == 30  # as on CUDA
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                ours + torch.ones(2, 3)

    @pytest.mark.parametrize(
        "what",
        [
            "cpu[index]",
            "cpu.index_put((index,), ours[:2])",
            "ours.index_put((index,), cpu[:2])",
            "torch.stack([ours.sum(), cpu.sum()])",
            "torch.cat([ours, cpu])",
            "ours.index_select(0, torch.tensor(1))",
            "ours.gather(0, torch.tensor(1))",
            "ours.scatter(0, index, cpu[:2])",
            "torch.nn.functional.embedding(torch.tensor(1), ours[:, None])",
            "torch.where(cpu > 1, ours, 0.0)",
            "ours.copy_(ours + cpu)",
            "torch.searchsorted(ours, cpu)",
        ],
    )
    def test_it_refuses_tensors_of_both_devices(self, what: str):
        cpu = torch.arange(3.0)
        with emulated():
            ours = torch.arange(3.0, device=NAME)
            names = {"torch": torch, "ours": ours, "cpu": cpu, "index": ours[:2].long()}
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                eval(what, names)

    @pytest.mark.parametrize(
        ("what", "count"),
        {
            "ours.sum().item()": 1,
            "ours.tolist()": 1,
            "bool(ours.any())": 1,
            "ours.nonzero()": 1,
            "ours[ours > 1]": 1,
            "ours[[0, 1]]": 1,
            "ours.cpu()": 1,
            "ours.unique()": 1,
            "torch.allclose(ours, ours)": 1,
            "torch.linalg.inv(ours[:1, None] + 1)": 1,
            "ours.multinomial(1)": 1,
            "torch.ones(3, device=NAME).repeat_interleave(ours.long())": 1,
            "torch.ones(3, device=NAME).repeat_interleave(ours.long(), output_size=3)": 0,
            "f'{ours}'": 1,
            "torch.get_device_module(NAME).Event().synchronize()": 1,
            "torch.get_device_module(NAME).current_stream().synchronize()": 1,
            "torch.get_device_module(NAME).current_stream().wait_event(None)": 0,
            "torch.tensor(3.0).to(NAME)": 1,
            "ours * torch.tensor(2.0)": 0,
            "ours.masked_fill(ours > 1, torch.tensor(2.0))": 0,
            "torch.tensor([1.0, 2.0], device=NAME)": 1,
            "torch.ones(3).to(NAME)": 1,
            "torch.ones(3).to(NAME, non_blocking=True)": 1,
            "torch.ones(3).pin_memory().to(NAME)": 1,
            "torch.ones(3).pin_memory().to(NAME, non_blocking=True)": 0,
            "torch.ones(3).pin_memory().copy_(ours)": 1,
            "torch.ones(3).copy_(ours, non_blocking=True)": 1,
            "torch.ones(3).pin_memory().copy_(ours, non_blocking=True)": 0,
            "ours.to('cpu', non_blocking=True)": 1,
            "ours.masked_fill(ours > 1, 0.0)": 0,
            "ours.where(ours > 1, 0.0).sum() + 1": 0,
            "torch.zeros(3, device=NAME)": 0,
            "ours.index_select(0, ours.long())": 0,
        }.items(),
    )
    def test_it_counts_waits(self, what: str, count: int):
        with emulated() as waits:
            ours = torch.arange(3.0, device=NAME)
            eval(what, {"torch": torch, "ours": ours, "NAME": NAME})
        assert waits.total == count, waits.found

    def test_it_has_autocast_memory_and_copies(self):
        with emulated():
            ours = torch.nn.Parameter(torch.ones(4, 4).to(NAME))
            with torch.autocast(NAME, dtype=torch.bfloat16):
                assert (ours @ ours).dtype == torch.bfloat16
                assert torch.nn.functional.linear(ours, ours).dtype == torch.bfloat16
            storage = ours.untyped_storage()
            assert storage.nbytes() == 64 and storage.device == DEVICE
            storage.resize_(0)
            assert ours.raw.untyped_storage().nbytes() == 0  # type: ignore[attr-defined]

    def test_outside_the_block_it_is_not_there(self):
        assert not torch.get_device_module(NAME).is_available()
        assert not isinstance(torch.ones(2), Emulated)


def on(device: str) -> Any:
    return emulated() if device == NAME else nullcontext()


FLOAT32 = ParallelPlan(param_dtype="float32")
EPS = 1e-4
"""Of Adam. With less, it divides a gradient near 0 by itself, and so makes steps of its rounding,
which is another on each type of CPU.
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "microbatches": {"train_micro_batch_size": 1},
    "packed": {"sequence_packing": True, "micro_batch_tokens": 40},
    "shared prompts": {"sequence_packing": True, "prompts": True},
    "all lengths in one call": {"varlen": True},
    "all lengths in one call, packed, shared prompts": {
        **{"sequence_packing": True, "prompts": True, "varlen": True},
        "activation_checkpointing": "full",
    },
    "recomputed": {"activation_checkpointing": "full"},
    "LoRA": {"lora": LoRAConfig(rank=4, alpha=8.0)},
    "foreach": {"implementation": "foreach"},
}


def batch_of(seed: int, *, prompts: bool) -> Any:
    """A batch, with `prompts` of responses to the same ones."""
    batch = random_batch([9, 2, 30, 17, 5, 12, 30, 8], seed=seed)
    if not prompts:
        return batch
    ids, response = batch.input_ids.clone(), batch.response_mask.clone()
    ids[:, :6], response[:, :6] = ids[:1, :6], False
    return replace(batch, input_ids=ids, response_mask=response)


def trained(device: str, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """All numbers of steps, with logprobs, a checkpoint, offloading and exported weights between
    them; on the emulated device the waits of each step, too.
    """
    options = dict(layout)
    prompts = options.pop("prompts", False)
    kernel: Any = used_on_cpus() if options.pop("varlen", False) else nullcontext([None])
    implementation = options.pop("implementation", "fused")
    plan = ParallelPlan(
        param_dtype=options.pop("param_dtype", "float32"),
        activation_checkpointing=options.pop("activation_checkpointing", "none"),
    )
    config = BackendConfig(
        parallel=plan,
        lora=options.pop("lora", LoRAConfig()),
        trainer=TrainerConfig(device=device, **options),
        optimizer=OptimizerConfig(
            lr=1e-2, eps=EPS, max_grad_norm=0.5, implementation=implementation
        ),
        keep_reference=True,
    )
    with on(device), kernel as calls:
        backend = DTensorBackend(tiny_model(scale=2.0))
        backend.setup(config)
        found: dict[str, Any] = {"metrics": [], "logprobs": []}
        for number in range(3):
            batch = batch_of(number, prompts=prompts)
            if number == 1:
                backend.save_checkpoint(folder / device, background=True)
                backend.wait_for_checkpoint()
            if number == 2:
                backend.offload()
                assert all(p.untyped_storage().nbytes() == 0 for p in backend._model.parameters())
                backend.load_checkpoint(folder / device)
            with counted() as step:
                found["metrics"].append(numbers(finalize(backend.train_step(batch, nll_loss))))
            with counted() as scoring:
                found["logprobs"].append(backend.get_logprobs(batch).values)
            if device == NAME:
                assert step.total == bound(STEP), step.places
                assert scoring.total == bound("`get_logprobs`, of a whole batch"), scoring.places
        found["logprobs"].append(backend.get_reference_logprobs(batch).values)
        found["weights"] = {name: value.cpu().clone() for name, value in backend.weights()}
        backend.shutdown()
        assert calls
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_the_cpus_and_waits_as_promised(layout: str, tmp_path: Path):
    cpu, ours = (trained(device, tmp_path, LAYOUTS[layout]) for device in ("cpu", NAME))
    torch.testing.assert_close(ours, cpu, rtol=2e-5, atol=2e-5)


def test_bfloat16_equals_the_cpus_within_its_rounding(tmp_path: Path):
    """Each is as far from float32, give or take: kernels round in other places."""
    options = {"param_dtype": "bfloat16", "sequence_packing": True}
    exact, cpu, ours = (
        trained(device, tmp_path / kind, layout)["logprobs"]
        for device, kind, layout in (
            ("cpu", "exact", {"sequence_packing": True}),
            ("cpu", "cpu", options),
            (NAME, "ours", options),
        )
    )
    for one, other, best in zip(ours, cpu, exact, strict=True):
        assert 0 < (one - best).abs().mean() <= 2 * (other - best).abs().mean()


GRPO = {
    "grpo": GRPOConfig(loss=ClippedLoss(dual_clip=3.0), off_policy=OffPolicyConfig(mode="mask")),
    "gspo": GRPOConfig(loss=GSPOLoss(), off_policy=OffPolicyConfig(mode="truncate")),
    "gspo by token": GRPOConfig(loss=GSPOLoss(token_gradient=True), entropy_coef=0.1),
    "cispo": GRPOConfig(loss=CISPOLoss(), kl=KLConfig(coef=0.1)),
    "reinforce": GRPOConfig(loss=ReinforceLoss()),
}


def batch_and_loss(algorithm: str, size: int) -> tuple[TokenBatch, LossFn]:
    """A batch of `size` sequences, or pairs, with all that the loss needs."""
    if algorithm in CONFIGS:
        pairs = random_pairs(CONFIGS[algorithm], count=size)
        return pairs, preference_loss.make_loss(CONFIGS[algorithm], pairs, 0.1)
    batch = random_batch([*islice(cycle([9, 14, 30, 17, 12]), size)])
    if algorithm == "sft":
        return batch, sft.loss_fn
    names = ("advantages", "prev_logprobs", "reference_logprobs", "generation_logprobs")
    given = {name: torch.randn(batch.input_ids.shape) for name in names}
    kind = LogprobKind(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    return replace(batch, logprob_kind=kind, **given), policy_loss.make_loss(GRPO[algorithm])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("algorithm", ["sft", *GRPO, *CONFIGS])
def test_the_host_waits_for_nothing_between_microbatches(algorithm: str, packed: bool):
    forwards, waits = [], []
    with emulated():
        backend = DTensorBackend(tiny_model())
        layout = TrainerConfig(
            device=NAME,
            train_micro_batch_size=1,
            **({"sequence_packing": True, "packed_row_tokens": 64} if packed else {}),
        )
        backend.setup(BackendConfig(trainer=layout, parallel=FLOAT32))
        embedding = backend.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda *_: forwards.append(len(waits)))
        for size in (2, 10) if packed else (1, 3):
            batch, loss_fn = batch_and_loss(algorithm, size)
            with counted() as found:
                finalize(backend.train_step(batch, loss_fn))
            waits.append(found)
    few, many = forwards.count(0), forwards.count(1)
    assert many > few
    assert waits[0].total == bound(STEP)
    more = (many - few) * bound("a microbatch, of any loss")
    assert waits[1].total - waits[0].total == more, waits[1].places


class StepWaits(Callback):
    """The waits of each step, from which checkpoints are left out, and its passes of the engine."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes
        self.found: list[tuple[Waits, int]] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        gpu.waits = Waits()
        self.passes.clear()

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.found.append((gpu.waits, len(self.passes)))
        gpu.waits = Waits()


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (sft_config, {}),
    "grpo": (grpo_config, {}),
    "grpo with KL": (grpo_config, {"kl": nemorl.KLConfig(coef=0.1)}),
    "grpo offloaded": (grpo_config, {}),
    "dpo": (dpo_config, {}),
}
SCORED = {"sft": 0, "grpo": 1, "grpo with KL": 2, "grpo offloaded": 1, "dpo": 1}
"""Batches of which a step computes log-probabilities."""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The passes of the embedded engine."""
    found, draw = [], TorchGenerationBackend._draw

    def watched(engine: TorchGenerationBackend, work: Any) -> torch.Tensor:
        found.append(work)
        return draw(engine, work)

    monkeypatch.setattr(TorchGenerationBackend, "_draw", watched)
    return found


def run(kind: str, device: str, folder: Path, passes: list[Any]) -> tuple[Any, StepWaits]:
    make, options = RUNS[kind]
    waits, pairs = StepWaits(passes), make is dpo_config
    offloads = {"offload_during_generation": True} if kind == "grpo offloaded" else {}
    offloads = offloads if device == NAME else {}
    config = make(
        folder,
        steps=4,
        run={"save_period": 2, "val_period": 2, "export": True},
        trainer=TrainerConfig(device=device, **offloads),
        parallel=FLOAT32,
        **options,
    )
    with on(device):
        rows = preference_rows(8, seed=1) if pairs else addition_rows(8)
        return start(config, validation=rows, callbacks=[waits]), waits


def evaluated(model: Path, device: str) -> Any:
    with on(device):
        settings = {"trainer": {"device": device}, "parallel": {"param_dtype": "float32"}}
        return nemorl.evaluate(str(model), addition_rows(8), "exact_match", **settings)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_equals_the_cpus(kind: str, passes: list[Any], tmp_path: Path):
    cpu, _ = run(kind, "cpu", tmp_path / "cpu", [])
    ours, waits = run(kind, NAME, tmp_path / "ours", passes)
    for mine, theirs in zip(ours.history, cpu.history, strict=True):
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=1e-4, abs=1e-5)
    exported = [load_causal_lm(str(result.paths.hf)).state_dict() for result in (ours, cpu)]
    # AdamW moves a weight without a gradient as far as rounding says.
    torch.testing.assert_close(*exported, rtol=1e-4, atol=2e-4)
    if kind == "sft":
        settings = ((cpu, "cpu"), (ours, NAME))
        one, other = (evaluated(result.paths.hf, device) for result, device in settings)
        assert one == other
    for step in (0, 2):  # without validation
        found, sampled = waits.found[step]
        assert (sampled > 0) == kind.startswith("grpo")
        offloaded = step > 0 and kind == "grpo offloaded"  # before there is nothing to offload
        expected = (
            bound(STEP)
            + SCORED[kind] * bound("`get_logprobs`, of a whole batch")
            + sampled * bound("a pass of the embedded engine: a token of all sequences")
            + offloaded * bound("offloading the trainer, and back")
        )
        assert found.total == expected, found.places


@pytest.mark.parametrize(
    "algorithm", ["grpo", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sft", "dpo"))]
)
def test_a_killed_run_goes_on_bit_for_bit(algorithm: str, forked: Path, tmp_path: Path):
    options = {"algorithm": algorithm, "emulated": True}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    python = forked / "python"
    in_a_process(python, folder=str(whole), resume=False, **options)
    first = {"folder": str(parts), "resume": False, "kill": "between", "at": 3}
    in_a_process(python, killed=True, **first, **options)
    in_a_process(python, folder=str(parts), resume=True, **options)
    assert_equal_outcomes(parts, whole)


def sampled(device: str, params: SamplingParams, *, precision: str = "float32") -> Any:
    """Responses to prompts of different lengths, and waits by kind."""
    with on(device):
        engine = TorchGenerationBackend(
            model=tiny_model(scale=2.0).to(device), tokenizer=tiny_tokenizer(), precision=precision
        )
        engine.setup(GenerationConfig(max_batch_size=4))
        prompts = [tuple(range(2, 2 + length)) for length in (3, 9, 4, 1, 6, 2)]
        with counted() as waits:
            found = engine.generate(prompts, replace(params, seed=3, n=2))
        engine.shutdown()
    return found, waits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_new_tokens=7),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, max_new_tokens=7),
        SamplingParams(stop_strings=("1",), max_new_tokens=12),
    ],
    ids=["greedy", "filters", "stop strings"],
)
def test_the_embedded_engine_waits_once_a_token(params: SamplingParams, passes: list[Any]):
    cpu, _ = sampled("cpu", params)
    passes.clear()
    ours, waits = sampled(NAME, params)
    for mine, theirs in zip(ours, cpu, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    token = bound("a pass of the embedded engine: a token of all sequences")
    assert waits.total == token * len(passes), waits.places


def sampled_by_ranks(folder: Path, tp: int, *, records: bool) -> tuple[int, Waits]:
    """The passes of the engine for six answers, and the waits."""
    passes, draw = [], Engine._draw

    def watched(engine: Engine, work: Any) -> torch.Tensor:
        passes.append(work)
        return draw(engine, work)

    with emulated(), patch.object(Engine, "_draw", watched):
        backend = MegatronBackend()
        backend.setup(
            BackendConfig(
                model=ModelConfig(path=str(folder)),
                trainer=TrainerConfig(device=NAME, backend="megatron", router_replay=records),
                parallel=ParallelPlan(dp_shard=1, tp=tp, param_dtype="float32"),
            )
        )
        backend.open_engine(max_batch_size=4, max_positions=64, end_tokens=[1])
        new = [
            (number, [2 + number] * (1 + number), SamplingParams(seed=number, max_new_tokens=6))
            for number in range(6)
        ]
        with counted() as waits:
            answers, _ = backend.decode(Order(new=new, passes=100))
        backend.shutdown()
    assert len(answers) == 6
    return len(passes), waits


def test_ranks_that_generate_wait_once_a_token(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    sample = partial(sampled_by_ranks, records=False)
    for passes, waits in run_ranks(2, sample, tmp_path, 2, process_group=False):
        token = bound("a pass of the embedded engine: a token of all sequences")
        assert waits.total == token * passes, waits.places


def test_ranks_wait_once_an_answer_for_the_experts_that_it_took(tmp_path: Path):
    """Besides what megatron-core's layers of experts wait for."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    (passes, plain), (same, recorded) = (
        run_ranks(1, partial(sampled_by_ranks, records=on), tmp_path, 1, process_group=False)[0]
        for on in (False, True)
    )
    assert passes == same and recorded.total == plain.total + 6, recorded.places


PLANS = {
    "dtensor dp 2": ("dtensor", {"dp_shard": 2}),
    "dtensor dp 2, bfloat16": ("dtensor", {"dp_shard": 2, "param_dtype": "bfloat16"}),
    "dtensor tp 2": ("dtensor", {"tp": 2}),
    "dtensor cp 2": ("dtensor", {"cp": 2}),
    "megatron dp 2": ("megatron", {"dp_shard": 2}),
    "megatron tp 2": ("megatron", {"tp": 2}),
    "megatron pp 2": ("megatron", {"pp": 2}),
}


def on_rank(name: str, device: str, folder: Path) -> Any:
    backend_name, degrees = PLANS[name]
    with on(device):
        backend: Any = {"dtensor": DTensorBackend, "megatron": MegatronBackend}[backend_name]()
        backend.setup(
            BackendConfig(
                model=ModelConfig(path=str(folder)),
                trainer=TrainerConfig(
                    device=device, backend=backend_name, train_micro_batch_size=2
                ),
                optimizer=OptimizerConfig(lr=1e-2, eps=EPS),
                parallel=ParallelPlan(**{"param_dtype": "float32", **degrees}),
            )
        )
        metrics, waits = [], []
        for lengths in ([9, 2, 30, 17], [9, 2, 30, 17] * 3):
            with counted() as found:
                metrics.append(
                    numbers(finalize(backend.train_step(random_batch(lengths), nll_loss)))
                )
            waits.append(found)
        logprobs = backend.get_logprobs(random_batch([9, 4])).values
        with counted() as moving:
            backend.offload()
        weights = {key: value.cpu().clone() for key, value in backend.weights()}
        with counted() as back:
            assert backend._away.nbytes
            backend._away.restore()
        assert moving.total + back.total == bound("offloading the trainer, and back") * (
            device == NAME
        )
        backend.save_checkpoint(folder / name / device)
        backend.shutdown()
    return metrics, logprobs, weights, waits


OFTEN = ("dtensor dp 2", "dtensor tp 2", "megatron pp 2")


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_ranks_equal_the_cpus(name: str, tmp_path: Path):
    tiny_model(scale=2.0).save_pretrained(tmp_path)
    # With a process group that the backend makes, for both of the devices.
    cpu, ours = (
        run_ranks(2, on_rank, name, device, tmp_path, process_group=device == "cpu")
        for device in ("cpu", NAME)
    )
    tolerance = 0.1 if "bfloat16" in name else 2e-5
    for mine, theirs in zip(ours, cpu, strict=True):
        torch.testing.assert_close(mine[:3], theirs[:3], rtol=tolerance, atol=tolerance)
    hops = 2 * (name == "megatron pp 2")  # megatron-core's stages send each other shapes
    part = bound("a microbatch, of any loss") + hops
    firsts, seconds = zip(*(mine[3] for mine in ours), strict=True)
    sends, alone = bound("the same, on a rank that sends metrics"), bound(STEP)
    steps = [sends if "dp" in name else alone, sends]
    assert sorted(each.total for each in firsts) == [step + 2 * part for step in steps]
    for first, second in zip(firsts, seconds, strict=True):
        assert second.total == first.total + 4 * part, second.places


CASES = [each for each in (*QUICK, *REST) if each.ranks in (1, 2) and not each.compile]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", chunks(CASES), ids=lambda chunk: f"with {chunk[0].plan}")
def test_the_parity_of_plans(chunk: list[Case]):
    for case, found in zip(chunk, run_chunk(chunk, NAME), strict=True):
        assert verdict(case, found) == (True, ""), case
