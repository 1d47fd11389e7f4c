"""Proofs of what a model can do here, on a tiny one of its class: values and gradients against
plain transformers, sequence by sequence.
"""

import copy
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemorl.data.batch import TokenBatch, collate, each_array
from nemorl.losses import LogprobKind, LossOutput, Needs
from nemorl.models.adapters import full_tensor, live_tensors, merge_folder
from nemorl.models.capabilities import (
    ASSUMED,
    CAPABILITIES,
    Capability,
    Proof,
    Proofs,
    as_json,
    from_json,
    keep,
)
from nemorl.models.causal_lm import load_causal_lm
from nemorl.models.hub import copy_code, has_own_code, read_config
from nemorl.models.tiny import tiny_config, tiny_model
from nemorl.parallel.config import BackendConfig, LoRAConfig, OptimizerConfig, TrainerConfig
from nemorl.parallel.plan import ParallelPlan
from nemorl.rollout.config import GenerationConfig
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.torch_backend import TorchGenerationBackend

LIMIT = 5e-5
"""Largest difference of float32 that is rounding: of a log-probability, and of a gradient relative
to the largest of its parameter.
"""
PLANS: dict[Capability, tuple[ParallelPlan, ...]] = {
    "fsdp": (ParallelPlan(dp_shard=2),),
    "tp": (ParallelPlan(tp=2), ParallelPlan(tp=2, sequence_parallel=False)),
    "cp": (ParallelPlan(cp=2), ParallelPlan(cp=2, cp_method="allgather")),
}
ROWS = TrainerConfig(train_micro_batch_size=1, share_prompts=False)
TRAINERS: dict[Capability, TrainerConfig] = {
    "alone": ROWS,
    "padded": TrainerConfig(share_prompts=False),
    "packed": TrainerConfig(sequence_packing=True, packed_row_tokens=48, share_prompts=False),
    "shared_prompts": TrainerConfig(),
    "head": replace(ROWS, logprob_chunk=3),
    "recompute": ROWS,
}
TIMEOUT_S, COLLECTIVE_S = 300.0, 60.0
"""Longest time of the two ranks, and of their wait for each other, where one has failed."""
RESULT = "result.json"


@dataclass(frozen=True)
class Outputs:
    """Log-probabilities and entropies of responses, and the gradients of their weighted sum."""

    values: list[Tensor]
    gradients: dict[str, Tensor]

    def worst(self, other: "Outputs") -> float:
        pairs = zip(self.values, other.values, strict=True)
        found = max(float((a - b).abs().max()) for a, b in pairs)
        if self.gradients.keys() != other.gradients.keys():
            return float("inf")
        top = max(float(x.abs().max()) for x in self.gradients.values())
        for name, own in self.gradients.items():
            size = max(float(own.abs().max()), 0.01 * top)
            found = max(found, float((own - other.gradients[name]).abs().max()) / size)
        return found


def prove(config: Any, *, device: str = "cpu") -> dict[Capability, Proof]:
    """Prove what models with a Hugging Face configuration can do here, in seconds.

    A tiny model with every kind of layer is computed in float32 by nemorl, on `device` and on two
    ranks of this machine's CPU, and sequence by sequence by transformers' "eager" code.

    Returns: of each capability whether it holds, with the largest difference, or why not.

    Raises: ValueError if no tiny model can be made; RuntimeError if the ranks give no answer.
    """
    tiny = tiny_config(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save_pretrained(folder)
        copy_code(folder, tiny_model(tiny))
        ranks = _start_ranks(folder, trust=has_own_code(config))
        try:
            return {**on_one_device(tiny, device), **_of_ranks(ranks, folder)}
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def proved_now(config: Any) -> Proofs:
    """Prove what models can do, and keep it for later runs."""
    found = prove(config)
    keep(config, found)
    return found


def on_one_device(config: Any, device: str = "cpu") -> dict[Capability, Proof]:
    """Prove what takes one device, of a tiny configuration."""
    model, rows = tiny_model(config).to(device), samples(config.vocab_size)
    plain, warm = (expected(model, rows, temperature) for temperature in (1.0, 0.7))
    tries: dict[Capability, Callable[[], float]] = {}

    def differs(of: Outputs, settings: BackendConfig, temperature: float, **how: bool) -> float:
        return of.worst(computed(model, rows, settings, temperature, **how))

    for name, trainer in TRAINERS.items():
        settings = _settings(replace(trainer, device=device))
        if name == "recompute":
            plan = replace(settings.parallel, activation_checkpointing="full")
            settings = replace(settings, parallel=plan)
        of, temperature = (warm, 0.7) if name == "head" else (plain, 1.0)
        tries[name] = partial(differs, of, settings, temperature)
    tries["left_padded"] = partial(tries["padded"], left=True)  # type: ignore[call-arg]
    alone = replace(ROWS, device=device)
    adapted = {"lora": LoRAConfig(rank=4, alpha=8), "optimizer": OptimizerConfig(lr=0.05)}
    tries["lora"] = partial(_read_back, model, rows, _settings(alone, **adapted))
    tries["export"] = partial(_read_back, model, rows, _settings(alone))
    tries["cached"] = partial(_sampled, model, rows)
    return {name: proof_of(tries[name]) for name in CAPABILITIES if name in tries}


def proof_of(attempt: Callable[[], float]) -> Proof:
    """Return whether an attempt's difference is rounding, or why it has none."""
    try:
        worst = attempt()
    except Exception as error:  # whatever a model's own code raises
        first = next(iter(str(error).strip().splitlines()), "").partition(". ")[0]
        said = isinstance(error, ValueError | AttributeError | TypeError | RuntimeError) and first
        return Proof(False, None, first if said else f"{type(error).__name__}: {first}")
    if worst <= LIMIT:
        return Proof(True, worst)
    return Proof(False, worst, f"numbers differ by {worst:.2g}")


def samples(vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and responses: two responses to each prompt."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocab_size, (count,), generator=generator).tolist()

    prompts = [tokens(6), tokens(9)]
    return [(prompts[row // 2], tokens(count)) for row, count in enumerate((15, 4, 12, 20))]


def expected(
    model: Any, rows: Iterable[tuple[list[int], list[int]]], temperature: float
) -> Outputs:
    """Compute each sequence alone by the model's own forward pass."""
    model.zero_grad()
    values, total = [], torch.zeros(())
    for prompt, response in rows:
        ids = torch.tensor([prompt + response], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        every = (logits / temperature).log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        logprobs = every.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        total = total.to(ids.device) + (_weights(response).to(ids.device) * logprobs).sum()
        values += [logprobs.detach().cpu(), entropy.detach().cpu()]
    total.backward()
    return Outputs(values, _gradients(model))


def computed(
    model: Any,
    rows: list[tuple[list[int], list[int]]],
    settings: BackendConfig,
    temperature: float = 1.0,
    *,
    left: bool = False,
) -> Outputs:
    """Compute the same by the training backend.

    left: rows are padded on the left.
    """
    with trained(copy.deepcopy(model), settings) as backend:
        batch = batch_of(rows, temperature)
        if left:
            shifts = (batch.input_ids.shape[1] - batch.lengths).tolist()
            batch = each_array(
                batch,
                lambda x, _: torch.stack(
                    [row.roll(n, 0) for row, n in zip(x, shifts, strict=True)]
                ),
            )
        backend.forward_backward(batch, weighted)
        output = backend.compute(batch, Needs(entropy=True))
        values = []
        for row in range(len(rows)):
            mask = batch.response_mask[row]
            values += [output.token_logprobs[row][mask], output.entropy[row][mask]]
        return Outputs([x.detach().cpu() for x in values], _gradients(backend.model))


def weighted(output: Any, batch: TokenBatch) -> LossOutput:
    """Return the sum of the weighted log-probabilities."""
    return LossOutput((output.token_logprobs * batch.loss_weights).sum(), {})


def batch_of(rows: Iterable[tuple[list[int], list[int]]], temperature: float = 1.0) -> TokenBatch:
    """Return sequences as a batch to train on."""
    examples = []
    for prompt, response in rows:
        mask = [False] * len(prompt) + [True] * len(response)
        ids = prompt + response
        examples.append({"input_ids": ids, "loss_mask": mask, "response_mask": mask})
    batch = collate(examples, logprob_kind=LogprobKind(temperature=temperature))
    weights = torch.zeros(batch.input_ids.shape)
    weights[batch.loss_mask] = torch.cat([_weights(response) for _, response in rows])
    return replace(batch, loss_weights=weights)


def _weights(response: list[int]) -> Tensor:
    return torch.linspace(-1, 1, len(response))


def _gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: full_tensor(p.grad).detach().cpu().clone()
        for name, p in live_tensors(model).items()
        if p.grad is not None
    }


def _settings(trainer: TrainerConfig, **others: Any) -> BackendConfig:
    others = {"parallel": ParallelPlan(param_dtype="float32"), **others}
    return BackendConfig(
        trainer=trainer, proofs=ASSUMED, collective_timeout_s=COLLECTIVE_S, **others
    )


@contextmanager
def trained(model: Any, settings: BackendConfig) -> Iterator[Any]:
    """Have a training backend for a model in the block."""
    from nemorl.parallel.dtensor.backend import DTensorBackend

    backend = DTensorBackend(model)
    try:
        backend.setup(settings)
        yield backend
    finally:
        backend.shutdown()


def _logprobs_differ(model: Any, rows: Any, found: Iterable[Tensor]) -> float:
    with torch.enable_grad():
        own = expected(model, rows, 1.0).values[::2]
    return max(float((a - b.cpu()).abs().max()) for a, b in zip(own, found, strict=True))


def _read_back(model: Any, rows: Any, settings: BackendConfig) -> float:
    """Compare a model that took a step with its checkpoint, and with merged adapters' weights."""
    batch, merged = batch_of(rows), copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as name, trained(copy.deepcopy(model), settings) as backend:
        backend.train_step(batch, weighted)
        values, adapts = backend.get_logprobs(batch).values, bool(settings.lora.rank)
        merged.load_state_dict(dict(backend.weights()), strict=False)
        backend.save_checkpoint(folder := Path(name) / "saved")
        if adapts:
            read: Any = merge_folder(copy.deepcopy(model), folder).requires_grad_()
        else:
            read = load_causal_lm(str(folder), trust_remote_code=has_own_code(model.config))
    read.set_attn_implementation("eager")
    found = [row[mask] for row, mask in zip(values, batch.response_mask, strict=True)]
    models = [read.eval().to(model.device), *[merged] * adapts]
    return max(_logprobs_differ(each, rows, found) for each in models)


def _sampled(model: Any, rows: Any) -> float:
    engine = TorchGenerationBackend(model=copy.deepcopy(model), cached=True)
    engine.setup(GenerationConfig(max_batch_size=3))
    try:
        return sampled_differ(engine, model, rows)
    finally:
        engine.shutdown()


def sampled_differ(engine: Any, model: Any, rows: Any) -> float:
    """Sample with a generation backend for two prompts, and score each response alone."""
    prompts = [rows[0][0], rows[2][0]]
    params = SamplingParams(n=2, max_new_tokens=24, ignore_eos=True, seed=3)
    answers = engine.generate(prompts, params)
    pairs = [(prompts[i // 2], list(each.token_ids)) for i, each in enumerate(answers)]
    return _logprobs_differ(model, pairs, (torch.tensor(each.logprobs) for each in answers))


def _start_ranks(folder: Path, *, trust: bool) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", __name__, str(folder), *["trust"] * trust]
    started = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = {**os.environ, **shared, **own}
        with (folder / f"rank{rank}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def _of_ranks(ranks: list[subprocess.Popen[bytes]], folder: Path) -> dict[Capability, Proof]:
    end, why = time.monotonic() + TIMEOUT_S, f"they did not end in {TIMEOUT_S:g} s"
    with suppress(subprocess.TimeoutExpired):
        for rank in ranks:
            rank.wait(max(0.0, end - time.monotonic()))
        lines = (folder / "rank0.log").read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else "they said nothing"
    if not (result := folder / RESULT).is_file():
        raise RuntimeError(
            "a model must be checked on two processes of this machine, but they gave no result"
            f" ({why}): see that it has memory for them, and try again"
        )
    return {**from_json(result.read_bytes())}


def on_ranks(config: Any) -> dict[Capability, Proof]:
    """Prove what takes two ranks on a tiny configuration, in one of them."""
    model, rows = tiny_model(config), samples(config.vocab_size)
    of = expected(model, rows, 1.0)
    trainer = TrainerConfig(device="cpu", share_prompts=False)

    def attempt(plans: tuple[ParallelPlan, ...]) -> float:
        own = (_settings(trainer, parallel=replace(plan, param_dtype="float32")) for plan in plans)
        return max(of.worst(computed(model, rows, settings)) for settings in own)

    return {name: proof_of(partial(attempt, plans)) for name, plans in PLANS.items()}


def _be_rank(folder: Path, *, trust: bool) -> None:
    found = on_ranks(read_config(str(folder), trust_remote_code=trust))
    if os.environ["RANK"] == "0":
        aside = folder / "result.tmp"
        aside.write_text(as_json(found))
        aside.replace(folder / RESULT)


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]), trust="trust" in sys.argv)
    os._exit(0)  # process groups' threads would be waited for
