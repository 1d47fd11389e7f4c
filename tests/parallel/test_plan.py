"""Which layers the stages of a plan have."""

import pytest

from nemorl.parallel.plan import ParallelPlan


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_stages_of_all_sizes_have_each_layer_once(pp: int, vpp: int):
    plan = ParallelPlan(pp=pp, vpp=vpp)
    for layers in range(plan.num_stages, 130):
        stages = plan.stage_layers(layers)
        counts = [len(stage) for stage in stages]
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        assert len(stages) == plan.num_stages and min(counts) > 0
        assert layers % plan.num_stages or len(set(counts)) == 1
        # No device waits for another for more than an end's layer's worth.
        assert max(counts) <= -(-(layers + 2) // plan.num_stages)
        of_devices = [sum(counts[rank::pp]) for rank in range(pp)]
        assert max(of_devices) - min(of_devices) <= 2


def test_large_models_have_shorter_stages_at_both_ends():
    """As Megatron's account_for_embedding_in_pipeline_split and ..loss."""
    for layers, pp, end in ((94, 4, 23), (94, 8, 11), (126, 8, 15), (126, 16, 7)):
        counts = [len(stage) for stage in ParallelPlan(pp=pp).stage_layers(layers)]
        assert counts == [end, *[end + 1] * (pp - 2), end]
