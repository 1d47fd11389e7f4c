import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemorl.runtime.watch.report.curves import (
    HEIGHT,
    LEFT,
    MOST_POINTS,
    WIDTH,
    Box,
    Curve,
    chart,
    curve_data,
    curve_sections,
    curves_of,
    grouped,
    ticks,
    time_shares,
)

METRICS = [
    {"step": step, "phase": "train", "reward": step / 10, "reward/brief": 0.1 * step, "loss": 1 / step, "lr": 1e-5, "my_own": step, "ratio_max": 1.0,
     "seconds": 2.0, "seconds_generate": 1.5, "seconds_train": 0.4, "flag": True, "nothing": None}
    for step in range(1, 8)
] + [{"step": 4, "phase": "validation", "reward": 0.5, "accuracy": 0.25}]  # fmt: skip


def test_every_number_has_its_place():
    groups = {
        group: [curve.metric for curve in curves]
        for group, curves in grouped(curves_of(METRICS)).items()
    }
    assert groups == {
        "Learning": ["reward", "accuracy", "loss", "reward/brief"],
        "Updates": ["lr", "ratio_max"],
        "Speed and resources": ["seconds", "seconds_generate", "seconds_train"],
        "Other": ["my_own"],
    }


def test_the_gap_is_measured_apart():
    names = [
        "gen_kl_error",
        "gen_kl_error_max",
        "token_mult_prob_error",
        "token_mult_prob_error_max",
    ]
    (curves,) = grouped(
        curves_of([{"step": 1, "phase": "train", **dict.fromkeys(names, 1.0)}])
    ).values()
    assert {curve.metric for curve in curves} == set(names) and all(
        curve.meaning for curve in curves
    )
    agreement = Curve(
        "token_mult_prob_error", ([1, 2, 3], [1.000001, 1.000003, 1.000002]), ([], [])
    )
    assert agreement.box.low < 1 and agreement.box.high > 1.01  # not a mountain of rounding errors
    assert Curve("token_mult_prob_error", ([1, 2], [1.2, 1.3]), ([], [])).box.high > 1.3


def test_engines_have_a_section_with_the_names_that_metrics_have():
    (curves,) = grouped(
        curves_of(
            [
                {
                    "step": 1,
                    "phase": "train",
                    "generation/replica_0/busy": 0.9,
                    "generation/tokens_per_second": 1e4,
                }
            ]
        )
    ).values()
    assert [(curve.title, curve.meaning) for curve in curves] == [
        ("replica_0/busy", "share of the time of generating in which it computed"),
        ("tokens_per_second", "while generating"),
    ]


def test_what_the_trainer_costs_is_told_with_the_speed():
    names = [
        "trainer/seconds",
        "trainer/memory_gb",
        "trainer/tflops_per_device",
        "trainer/mfu",
        "tokens_per_second",
        "seconds",
    ]
    (group,) = grouped(
        curves_of([{"step": 1, "phase": "train", **dict.fromkeys(names, 1.0)}])
    ).items()
    assert (group[0], [curve.metric for curve in group[1]][:3]) == (
        "Speed and resources",
        ["tokens_per_second", "trainer/mfu", "seconds"],
    )
    assert {curve.metric for curve in group[1]} == set(names) and all(
        curve.meaning for curve in group[1]
    )
    assert time_shares(group[1]) is None, "an optimizer step is part of a phase, not another one"


def test_what_never_changes_is_told_in_words():
    page = curve_sections(curves_of(METRICS))
    assert "Constant: </b>Learning rate 1e-5 · ratio max 1.00" in page
    assert page.count("<figure") == len(
        [curve for curve in curves_of(METRICS) if not curve.constant]
    )
    assert re.findall(r'data-curve="(\d+)"', page) == ["0", "9", "2", "1", "4"]


def test_the_script_finds_its_numbers():
    curves = curves_of(METRICS)
    data = curve_data(curves)
    assert len(data) == len(curves) and data[3] == {}, "a constant has no curve"
    assert data[0]["train"] == [list(range(1, 8)), [step / 10 for step in range(1, 8)]]
    assert data[0]["validation"] == [[4], [0.5]]


def test_a_long_course_is_thinned():
    steps = list(range(1, 20_001))
    (found,) = curve_data(
        [Curve("loss", (steps, [math.sin(step / 100) for step in steps]), ([], []))]
    )
    assert MOST_POINTS / 2 < len(found["train"][0]) <= MOST_POINTS


def test_where_the_time_went():
    bar = time_shares(curves_of(METRICS))
    assert [re.sub("<.*?>", "", part) for part in re.findall(r"<span.*?</span>", bar)] == [
        "75% generate",
        "20% train",
        "5% other",
    ]
    assert time_shares(curves_of([{"step": 1, "phase": "train", "seconds": 1.0}])) is None


@given(
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=40),
    st.lists(st.floats(-1e-9, 1e3), max_size=5),
)
def test_every_curve_stays_on_its_picture(values, checks):
    curve = Curve(
        "loss",
        (list(range(1, len(values) + 1)), values),
        ([5 * place for place in range(len(checks))], checks),
    )
    picture = chart(curve, 0)
    for x, y in re.findall(
        r"(?:M|L|cx=\")(-?[\d.]+)(?: |\" cy=\")(-?[\d.]+)", picture.replace('cx="-9"', "")
    ):
        assert LEFT - 0.1 <= float(x) <= WIDTH and -0.1 <= float(y) <= HEIGHT


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9), st.integers(2, 8))
def test_ticks_are_few_in_order_and_within(low, size, most):
    high = low + size
    if high - low < 1e-9 * abs(low):
        return
    found = ticks(low, high, most=most)
    values = [value for value, _ in found]
    room = 1e-6 * (high - low) + 1e-9 * abs(low)
    assert len(found) <= most + 1 and values == sorted(values)
    assert all(low - room <= value <= high + room for value in values)


@pytest.mark.parametrize(
    "low, high", [(0, 1), (0.13, 0.87), (-3, 5), (1e-8, 3e-8), (9_000, 13_000), (0, 3e6), (1, 2)]
)
def test_ticks_can_be_told_apart(low, high):
    labels = [label for _, label in ticks(low, high, most=5)]
    assert 2 <= len(labels) == len(set(labels))


def test_a_flat_line_has_room():
    box = Box.around(([1, 2], [0.5, 0.5]))
    assert box.low < 0.5 < box.high
    assert Box.around(([3], [0.0])).high > 0
