"""A training backend of your own, chosen by its name: `trainer.backend`. Here a wrapper around the
built-in one that watches how it learns.

    python examples/custom_training_backend.py        the little demonstration below

`nemorl.TrainingBackend` says what each method must do, and
tests/parallel/test_training_conformance.py is what every one passes, this one, too. Most of it is
handed through: a wrapper is the way to measure or change something about training without writing
an engine.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import nemorl
import torch
from nemorl.losses import Logprobs, Metrics, Sum, merge
from nemorl.parallel.backend import ForwardOutput, LossFn
from nemorl.parallel.dtensor.backend import DTensorBackend
from safetensors.torch import load_file, save_file


@nemorl.register_training_backend("watched")
class WatchedBackend:
    """Two more metrics for each step: how far the weights moved, and how far they are from where
    they began (Euclidean distances).
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        """Take a loaded model, or let `setup` load the configured one."""
        self.inner = DTensorBackend(model)

    def setup(self, config: nemorl.BackendConfig) -> None:
        self.inner.setup(config)
        self.first = self._weights()

    def train_step(self, batch: nemorl.TokenBatch, loss_fn: LossFn) -> Metrics:
        before = self._weights()
        metrics = self.inner.train_step(batch, loss_fn)
        after = self._weights()
        return merge(
            metrics,
            {
                "moved": Sum(distance(before, after)),
                "moved_in_all": Sum(distance(self.first, after)),
            },
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.inner.weights()}

    @property
    def step(self) -> int:
        return self.inner.step

    @property
    def model(self) -> torch.nn.Module:
        """The live model, which a generator in the same process shares."""
        return self.inner.model

    def compute(self, batch: nemorl.TokenBatch, needs: nemorl.Needs) -> ForwardOutput:
        return self.inner.compute(batch, needs)

    def get_logprobs(self, batch: nemorl.TokenBatch) -> Logprobs:
        return self.inner.get_logprobs(batch)

    def get_reference_logprobs(self, batch: nemorl.TokenBatch) -> Logprobs:
        return self.inner.get_reference_logprobs(batch)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.inner.weights()

    def offload(self, *, keep_weights: bool = False) -> None:
        self.inner.offload(keep_weights=keep_weights)

    def empty_cache(self) -> None:
        self.inner.empty_cache()

    def save_checkpoint(self, path: Path, *, background: bool = False) -> None:
        """What it knows besides goes along, or a resumed run would go on with other numbers (the
        suite finds that out).
        """
        self.inner.save_checkpoint(path, background=background)
        save_file(self.first, path / "first.safetensors")

    def wait_for_checkpoint(self) -> None:
        self.inner.wait_for_checkpoint()

    def load_checkpoint(self, path: Path) -> None:
        self.inner.load_checkpoint(path)
        self.first = {
            name: weight.to(self.first[name].device)
            for name, weight in load_file(path / "first.safetensors").items()
        }

    def shutdown(self) -> None:
        self.inner.shutdown()


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> torch.Tensor:
    return (
        torch.stack([(one[name] - other[name]).square().sum() for name in sorted(one)]).sum().sqrt()
    )


def demonstrate(folder: Path, steps: int = 20) -> None:
    """Supervised fine-tuning of a small model on addition."""
    from quickstart import save_model, save_tokenizer

    save_model(folder / "model", save_tokenizer(folder / "model"), seed=0)
    sums = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(10)]
    result = nemorl.train(
        algorithm="sft",
        model=folder / "model",
        dataset=sums,
        trainer__backend="watched",
        dir=str(folder / "run"),
        lr=1e-3,
        max_num_steps=steps,
        display="none",
    )
    for line in result.history[:: max(1, steps // 5)]:
        print(
            f"step {line['step']:2}  loss {line['loss']:.2f}  moved {line['moved']:.3f}, from the"
            f" start {line['moved_in_all']:.3f}"
        )


if __name__ == "__main__":
    demonstrate(Path("runs/custom_training_backend"), *map(int, sys.argv[1:2]))
