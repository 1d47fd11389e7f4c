"""Reward models, which score in a process of their own."""

import functools
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from nemorl.checks import short
from nemorl.models.hub import load_tokenizer, loading, model_folder
from nemorl.rollout.processes import Processes, judged_in_processes

PREFIX = "rm:"


def reward_model(name: str) -> Callable[..., Any]:
    """Return a reward by a run of `nemorl rm`, or by a folder or hub name of transformers'
    AutoModelForSequenceClassification with one label, whose tokenizer renders prompt and response.

    Its process ends with the function. Raises: ValueError for weights of another model.
    """
    folder, processes, lock = model_folder(name), Processes(scores), Lock()

    def rm(prompts: Any, completions: Any, *, device: str | None = None) -> Any:
        texts = [*zip(prompts, completions, strict=True)]
        call = {"folder": folder, "texts": texts, "device": device}
        with lock:  # one process for all threads
            return next(processes.run([call]))()

    rm([], [])
    return rm


@judged_in_processes(seconds=604_800, imports=("torch", "transformers"))
def scores(folder: str, texts: Sequence[tuple[Any, Any]], device: str | None) -> list[float]:
    """Return the model's score of each prompt with its response."""
    import torch

    from nemorl.data.batch import collate
    from nemorl.data.datasets import to_examples
    from nemorl.data.packing import merge, split, split_microbatches
    from nemorl.models.causal_lm import usable_device

    model, tokenizer = _loaded(folder)
    if not texts:
        return []
    rows = [{"prompt": prompt, "response": response} for prompt, response in texts]
    batch, pad = collate(to_examples(rows, tokenizer)), model.config.pad_token_id
    budget = max(16_384, batch.input_ids.shape[1])
    # Without padding, transformers takes the last place of each row.
    size: Any = {"rows": 1} if pad is None else {"token_budget": budget}
    found, plan, model = [], split_microbatches(batch, **size), model.to(usable_device(device))
    with torch.inference_mode():
        for part in split(batch, plan):
            real = part.segment_ids > 0
            ids = part.input_ids.masked_fill(~real, pad or 0)
            logits = model(ids.to(model.device), real.long().to(model.device)).logits
            found.append(logits[:, 0].float().cpu())
    return merge(found, plan).tolist()


@functools.cache
def _loaded(folder: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    options: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with loading(folder, field="reward"):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="auto", num_labels=1, **options
        )
        if wrong := {key: sorted(names) for key, names in report.items() if names}:
            kind = f"{type(model).__name__} with one label"
            raise ValueError(f"its weights are not those of a {kind}: {short(wrong, 300)}")
    return model.eval(), load_tokenizer(folder)
