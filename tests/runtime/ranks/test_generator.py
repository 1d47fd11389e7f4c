"""The receipt of weights that ranks take over, without ranks."""

import pytest
import torch

from nemorl.models.tensor_files import WeightsDiffer, sampled
from nemorl.rollout.generation import SamplingParams
from nemorl.rollout.scheduler import Request
from nemorl.runtime.ranks.generator import RankedGenerator
from nemorl.runtime.ranks.trainer import RankedTrainer
from tests.rollout.updates import update
from tests.tiny_models import tiny_model


class Ranks(RankedTrainer):
    """Hold weights in bfloat16, which they compute with, beside the whole ones."""

    def __init__(self, fault=lambda held: None):
        self.net, self.fault, self.main = tiny_model(), fault, {}

    def open_engine(self, **_):
        return {name: tuple(one.shape) for name, one in self.net.named_parameters()}

    def take_weights(self, weights, version):
        self.main = weights
        held = {name: one.detach().bfloat16() for name, one in weights.items()}
        self.fault(held)
        return {name: sampled(one, version) for name, one in held.items()}

    def weights(self):
        return iter(self.main.items())


def taken(ranks, version):
    generator = RankedGenerator(trainer=ranks)
    generator._expected = ranks.open_engine()
    update(generator, tiny_model(seed=1).named_parameters(), version)
    return generator


def test_rounding_to_the_ranks_type_is_no_difference():
    assert taken(Ranks(), 3).policy_version == 3


def test_ranks_that_compute_with_other_weights_are_found_out():
    """Though their main copy is the one that came."""

    def stale(held):
        held["model.norm.weight"] = torch.zeros_like(held["model.norm.weight"])

    with pytest.raises(WeightsDiffer, match=r"the ranks must hold .*'model.norm.weight' has 0"):
        taken(Ranks(stale), 3)


def test_a_failed_batch_raises_the_ranks_error_and_is_dropped_by_them():
    """An interrupt leaves them the requests."""
    ranks, orders = Ranks(), []

    def decode(order):
        orders.append(order)
        if len(orders) == 1:
            raise KeyboardInterrupt("a rank was asked")
        return {}, 0.0

    ranks.decode = decode
    generator = RankedGenerator(trainer=ranks)
    requests = [Request([token], SamplingParams(max_new_tokens=2)) for token in (5, 6)]
    with pytest.raises(KeyboardInterrupt, match="a rank was asked"):
        generator._step(requests, [])
    generator._step([], [])
    assert orders[1].dropped == [number for number, *_ in orders[0].new] == [0, 1]
