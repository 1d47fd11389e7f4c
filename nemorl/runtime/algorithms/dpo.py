"""Learning from preferences, without sampling: DPO and its relatives."""

from nemorl.losses.types import finalize
from nemorl.parallel.backend import ForwardOutput
from nemorl.runtime.algorithms.comparisons import (
    Comparisons,
    baseline,
    comparisons,
    make_loss,
    rewards,
    samples,
    with_loss_weights,
    with_reference,
    with_reference_logprobs,
)
from nemorl.runtime.algorithms.sft import in_chunks
from nemorl.runtime.config.offline import DPOConfig
from nemorl.runtime.run.loop import Run
from nemorl.runtime.run.samples import Samples


def dpo(run: Run[DPOConfig]) -> None:
    """Train on the preferences of `run.rows`."""
    config = run.config
    train, kept, run.lengths["train"] = comparisons(config, run.rows, run.tokenizer)
    held_out, _, run.lengths["validation"] = comparisons(
        config, run.validation_rows, run.tokenizer, in_pairs=True
    )
    order = run.order(kept)

    def validate() -> tuple[dict[str, float], Samples]:
        return validated(run, held_out)

    if config.reference == "precomputed":
        reference = run.backend("reference", trains=False)
        train = with_reference_logprobs(reference, train, config)
        held_out = with_reference_logprobs(reference, held_out, config)
        run.release("reference")
    last_step = config.planned_steps(order.num_rows)
    for step in run.steps(last_step, validate=validate if held_out.rows else None):
        rows = order.next(config.train_global_batch_size)
        with step.timed("reference"):
            batch = with_reference(run.trainer, [train.rows[i] for i in rows], config)
            batch = with_loss_weights(batch, config)
            kl = None
            if train.mismatched:
                kl = baseline(run.trainer, [train.mismatched[i] for i in rows], config)
                step.log({"kl_baseline": kl})
        step.train(batch, make_loss(config, batch, kl))


def validated(run: Run[DPOConfig], data: Comparisons) -> tuple[dict[str, float], Samples]:
    """Return metrics over all of the data, and some pairs."""
    config = run.config
    batch = with_loss_weights(with_reference(run.trainer, data.rows, config), config)
    logprobs = in_chunks(run.trainer.get_logprobs, batch, rows=config.train_global_batch_size)
    kl = baseline(run.trainer, data.mismatched, config) if data.mismatched else None
    output = make_loss(config, batch, kl)(ForwardOutput(logprobs), batch)
    metrics = finalize(output.metrics) | {"loss": float(output.loss)}
    if not data.in_pairs:
        return metrics, []
    chosen, rejected = rewards(config.loss, logprobs, batch).unflatten(0, (-1, 2)).unbind(-1)
    metrics |= {
        "accuracy": float((chosen > rejected).float().mean()),
        "margin": float((chosen - rejected).mean()),
        "chosen_reward": float(chosen.mean()),
        "rejected_reward": float(rejected.mean()),
    }
    examples = [example for row in data.rows for example in row]
    return metrics, samples(run, examples, chosen, rejected)
