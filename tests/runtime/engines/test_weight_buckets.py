"""Names, shapes and buckets: what is expected of a model, what does not fit it, and where the
stream is cut.
"""

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from nemorl.models.adapters import merged_tensors
from nemorl.runtime.engines.weight_buckets import (
    ALIGNMENT,
    BucketCutter,
    Entry,
    WeightMismatch,
    aligned,
    checked_weights,
    expected_weights,
    layer_of,
)
from tests.tiny_models import KINDS, tiny_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_configuration_promises_is_what_its_model_exports(kind, tied):
    model = tiny_model(kind, tied=tied)
    exported = {name: tuple(tensor.shape) for name, tensor in merged_tensors(model)}
    assert list(expected_weights(model.config).items()) == list(exported.items())
    assert expected_weights(json.dumps(model.config.to_dict()).encode()) == exported
    assert ("lm_head.weight" in exported) is not tied


def weights(**shapes):
    return [(name, torch.zeros(shape)) for name, shape in shapes.items()]


def test_weights_that_fit_come_through_as_they_are():
    given = weights(a=(2,), b=(3, 4))
    assert all(
        out is tensor
        for (_, out), (_, tensor) in zip(
            checked_weights(given, {"b": (3, 4), "a": (2,)}), given, strict=True
        )
    )


def test_all_that_does_not_fit_is_listed_and_nothing_comes_after_it():
    expected = {"a": (2,), "b": (3,), "c": (4,), "d": (5,)}
    came = []
    with pytest.raises(WeightMismatch) as error:
        for name, _ in checked_weights(
            [*weights(a=(2,), b=(9,), c=(4,), extra=(1,)), *weights(a=(2,))], expected
        ):
            came.append(name)
    assert came == ["a"]
    assert (
        str(error.value)
        == "weights must be those of the generator's model, but 'b' does not fit (shape (9,), where"
        " (3,) is expected), 'extra' does not fit (no such parameter), 'a' does not fit (it came"
        " twice), 'd' is missing: use the same model on both sides"
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=8,
    )
)
def test_the_tensors_of_a_bucket_do_not_overlap(layout):
    entries: list[Entry] = []
    for dtype, shape in layout:
        entries.append(
            Entry(str(len(entries)), dtype, tuple(shape), entries[-1].end if entries else 0)
        )
    memory = torch.zeros(entries[-1].end if entries else 0, dtype=torch.uint8)
    for number, entry in enumerate(entries, 1):
        assert entry.offset % ALIGNMENT == 0
        assert (entry.of(memory).shape, entry.of(memory).dtype) == (entry.shape, entry.dtype)
        entry.of(memory).fill_(number)
    for number, entry in enumerate(entries, 1):
        assert bool((entry.of(memory) == number).all())


NAMES = st.sampled_from(
    ["embed", "norm", *[f"layers.{i}.{part}" for i in range(4) for part in "abc"]]
)


@given(st.dictionaries(NAMES, st.integers(1, 30)), st.integers(1, 60), st.randoms())
def test_buckets_hold_everything_within_their_size_and_keep_layers_whole(
    sizes, bucket_bytes, random
):
    cutter, buckets = BucketCutter(sizes, bucket_bytes), [[]]
    for name in sizes:
        if not cutter.fits(name, sum(sizes[n] for n in buckets[-1])):
            buckets.append([])
        buckets[-1].append(name)
    assert [name for bucket in buckets for name in bucket] == list(sizes)
    for bucket in buckets:
        size = sum(sizes[name] for name in bucket)
        assert size <= bucket_bytes or len(bucket) == 1
        assert size <= (cutter.capacity if sizes else 0)
    if list(sizes) == sorted(sizes):  # else a layer's parts do not come together
        for layer in {layer_of(name) for name in sizes}:
            parts = [name for name in sizes if layer_of(name) == layer]
            homes = {
                number for number, bucket in enumerate(buckets) for name in bucket if name in parts
            }
            assert len(homes) == 1 or sum(sizes[name] for name in parts) > bucket_bytes


def test_a_bucket_is_not_larger_than_the_model_nor_smaller_than_its_largest_tensor():
    assert BucketCutter({"a": 5, "b": 6}, 100).capacity == 11
    assert BucketCutter({"a": 500, "b": 6}, 100).capacity == 500
    assert aligned(65) == 128
