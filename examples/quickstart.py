"""A language model learns to add by reinforcement learning, on a laptop CPU, in a few minutes.

1. Build a small Qwen2 model (0.8 M parameters), a character tokenizer and the data, from nothing.
2. SFT on demonstrations of which most are wrong: their author mostly forgets the carry. The model
   picks up the bad habit.
3. GRPO with an exact-answer reward, through the same code that trains on a cluster. The model gets
   rid of it.

Sums are written as one computes them on paper, the last digit first: the answer to 27+46= is 37.
"""

import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import nemorl
import tyro
from rich.console import Console

print = Console(highlight=False, soft_wrap=True).print

ALPHABET = "0123456789+="


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Teach a small language model two-digit addition."""

    dir: Path = Path("runs/quickstart")
    """Where model, data and the two runs are kept; a quickstart that is there already is replaced.
    """
    seed: int = 0
    """Of the model, the data and the sampling."""
    sft_steps: int = 500
    """Steps of supervised fine-tuning."""
    grpo_steps: int = 120
    """Steps of reinforcement learning."""
    wrong_share: float = 0.6
    """Share of the demonstrations whose answer is wrong."""
    num_held_out: int = 1000
    """Sums that are never trained on; accuracy is measured on them."""
    engine: Literal["torch", "vllm"] = "torch"
    """What answers in reinforcement learning: the embedded engine, or vLLM in a process of its own
    that Ray starts.
    """
    training: Literal["dtensor", "megatron"] = "dtensor"
    """What trains: PyTorch in this process, or megatron-core in one that Ray starts."""


def save_tokenizer(folder: Path) -> int:
    """One token per character. Returns the size of the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    return len(vocabulary)


def save_model(folder: Path, vocab_size: int, seed: int) -> None:
    """A Qwen2 with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the model is there at once
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def demonstration(folder: Path, *flags: str) -> list[str]:
    """Flags with which a model that knows nothing learns to add 1, for other examples."""
    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    sums = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return [
        f"--model.path={folder / 'model'}", f"--data.train={data}", f"--data.validation={data}",
        f"--run.dir={folder / 'run'}", "--optimizer.lr=3e-3", "--generation.max-new-tokens=1",
        "--num-prompts-per-step=9", "--num-generations-per-prompt=16", "--max-num-steps=30",
        "--run.val-at-start=true", "--run.display=plain", *flags,
    ]  # fmt: skip


def save_rows(folder: Path, settings: Quickstart) -> None:
    """All sums of two numbers from 10 to 99: rows to train on, whose demonstration is mostly wrong,
    and rows held out.
    """
    rng = random.Random(settings.seed)
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(sums)
    rows = []
    for a, b in sums:
        shown = a + b
        if rng.random() < settings.wrong_share:
            shown = (a + b) % 10 + 10 * ((a // 10 + b // 10) % 10)  # without any carry
            if shown == a + b:  # there was none to forget
                shown += rng.choice([-3, -2, -1, 1, 2, 3])
        rows.append(
            {"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1], "response": str(shown)[::-1]}
        )
    for name, part in (
        ("held_out", rows[: settings.num_held_out]),
        ("train", rows[settings.num_held_out :]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def show_answers(title: str, model: Path, engine: dict[str, Any], count: int = 6) -> None:
    """What the model answers to the first sums that were held out; the last digit comes first, as
    in the demonstrations.
    """
    result = nemorl.evaluate(
        model,
        model.parent / "held_out.jsonl",
        max_rows=count,
        generation={"temperature": 0.0, "max_new_tokens": 5, **engine},
    )
    print(f"\n[bold]{title}[/] (the last digit comes first)")
    for answer in result["answers"]:
        mark = (
            "[green]right[/]"
            if answer["reward"] == 1
            else f"[red]wrong[/], it is {answer['answer']}"
        )
        print(f"  {answer['prompt']}{answer['response']:<4} {mark}")
    print()


def main(settings: Quickstart) -> None:
    folder, seed = settings.dir, settings.seed
    for name in ("model", "sft", "grpo"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", save_tokenizer(folder / "model"), seed)
    save_rows(folder, settings)
    data = nemorl.DataConfig(
        train=str(folder / "train.jsonl"),
        validation=str(folder / "held_out.jsonl"),
        max_total_sequence_length=16,
    )
    generation = nemorl.GenerationConfig(max_new_tokens=5, max_batch_size=1024)
    engine: dict[str, Any] = (
        {"backend": "vllm", "num_replicas": 1} if settings.engine == "vllm" else {}
    )
    trainer = nemorl.TrainerConfig(backend=settings.training)

    start = time.perf_counter()
    print(
        f"[bold]Supervised fine-tuning[/] on demonstrations of which {settings.wrong_share:.0%} are"
        " wrong"
    )
    warm = nemorl.run(
        nemorl.SFTConfig(
            model=nemorl.ModelConfig(path=str(folder / "model")),
            data=data,
            trainer=trainer,
            optimizer=nemorl.OptimizerConfig(
                lr=1e-3, schedule="cosine", warmup_steps=20, min_lr_ratio=0.1
            ),
            generation=generation,
            run=nemorl.RunConfig(
                dir=str(folder / "sft"), seed=seed, max_val_samples=settings.num_held_out
            ),
            train_global_batch_size=128,
            max_num_steps=settings.sft_steps,
        )
    )
    seconds = time.perf_counter() - start
    if engine:
        print(
            "From here on vLLM answers; it takes some 15 seconds to start, each time that a model"
            " is loaded"
        )
    show_answers("Answers after supervised fine-tuning", folder / "sft", engine)

    start = time.perf_counter()
    print("[bold]Reinforcement learning[/] (GRPO), reward 1 for the exact answer")
    trained = nemorl.run(
        nemorl.GRPOConfig(
            model=nemorl.ModelConfig(path=str(folder / "sft" / "hf")),
            data=data,
            trainer=trainer,
            optimizer=nemorl.OptimizerConfig(lr=3e-4, schedule="linear", min_lr_ratio=0.1),
            generation=replace(generation, **engine),
            kl=nemorl.KLConfig(coef=0.001),
            run=nemorl.RunConfig(
                dir=str(folder / "grpo"),
                seed=seed,
                val_at_start=True,
                val_period=30,
                save_period=60,
                max_val_samples=settings.num_held_out,
            ),
            num_prompts_per_step=64,
            num_generations_per_prompt=16,
            max_num_steps=settings.grpo_steps,
        )
    )
    seconds += time.perf_counter() - start
    show_answers("Answers after reinforcement learning", folder / "grpo", engine)

    run = folder / "grpo"
    command = (
        "nemorl"
        if shutil.which("nemorl")
        else os.path.relpath(Path(sys.executable).with_name("nemorl"))
    )
    print(
        f"""The curves are in [bold]{run / "plots" / "overview.png"}[/]. What to try next:
  ask the trained model
    {command} generate --model {run} --prompt "27+46=" --temperature 0
  continue for another 60 steps
    {command} grpo --run.dir {run} --run.resume --max-num-steps {settings.grpo_steps + 60}
  train on your own rows
    {command} grpo --config {run / "config.yaml"} --run.dir runs/mine --data.train FILE.jsonl
  see every setting explained
    {command} grpo --help
"""
    )
    before, after = warm.metrics["val_accuracy"], trained.metrics["val_accuracy"]
    print(
        f"held-out greedy accuracy: {before:.2f} -> {after:.2f} (seed {seed}, {seconds:.0f} s of"
        " training)"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(Quickstart))
    except KeyboardInterrupt:
        raise SystemExit("interrupted; make quickstart starts again") from None
