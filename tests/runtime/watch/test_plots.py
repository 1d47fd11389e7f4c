import math
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.watch import plots
from nemorl.runtime.watch.metrics import smooth
from nemorl.runtime.watch.plots import draw, svg


def learning_run(directory: RunDirectory, *, steps: int) -> None:
    generator = random.Random(0)
    for step in range(1, steps + 1):
        accuracy = 0.42 + 0.55 * (1 - math.exp(-step / 40))
        directory.append_metrics(
            step,
            {
                "reward": accuracy + generator.gauss(0, 0.04),
                "accuracy": accuracy,
                "response_length": 4 + generator.gauss(0, 0.2),
                "kl": step * 1e-4,
                "entropy": 1.2 * math.exp(-step / 60),
                "loss": generator.gauss(0, 0.02),
                "token_mult_prob_error": 1.01 + abs(generator.gauss(0, 0.002)),
                "tokens_per_second": 12000 + generator.gauss(0, 800),
                "trainer/mfu": 0.43 + generator.gauss(0, 0.01),
                "trainer/memory_gb": 61.5,
                "lr": 3e-4,
            },
        )
        if step % 20 == 0:
            directory.append_metrics(
                step, {"accuracy": accuracy, "reward": accuracy}, phase="validation"
            )


def test_every_metric_has_its_picture(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", "")
    learning_run(directory, steps=60)
    files = draw(directory)
    expected = [
        "reward",
        "accuracy",
        "loss",
        "kl",
        "entropy",
        "length",
        "gap",
        "lr",
        "throughput",
        "mfu",
        "memory",
        "overview",
    ]
    assert [path.stem for path in files] == expected
    for path in files:
        image = imread(path)
        assert image.shape[0] >= 500 and image.shape[1] >= 900
        assert image[..., :3].min() < 0.4 and image[..., :3].std() > 0.03, "something is drawn"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([(1, {"loss": 2.0, "grad_norm": 0.1})], ["loss", "overview"]),
        (
            [(1, {"loss": 2.0}), (2, {"loss": math.nan}), (3, {"loss": math.inf})],
            ["loss", "overview"],
        ),
        (
            [(1, {"reward": 0.0}), (2, {"reward": 0.0}), (3, {"kl": math.nan})],
            ["reward", "overview"],
        ),
        ([(1, {"tokens_per_second": 0.0})], ["throughput", "overview"]),
        ([(1, {"margin": 0.5})], ["margin", "overview"]),
        ([(1, {"grad_norm": 0.1})], []),
        ([], []),
    ],
)
def test_only_metrics_that_are_there(tmp_path, lines, expected):
    directory = RunDirectory.create(tmp_path / "run", "")
    for step, metrics in lines:
        directory.append_metrics(step, metrics)
    assert [path.stem for path in draw(directory.path)] == expected


def test_agreement_of_sampler_and_trainer_is_a_flat_line(tmp_path, monkeypatch):
    """A picture of rounding errors around 1 must not look like one of a wide gap; one of a wide gap
    shows it.
    """
    limits = []
    panel = plots.panel
    monkeypatch.setattr(
        plots,
        "panel",
        lambda axes, *arguments: (panel(axes, *arguments), limits.append(axes.get_ylim())),
    )
    for excess in (1e-6, 0.2):
        directory = RunDirectory.create(tmp_path / str(excess), "")
        for step in range(1, 4):
            directory.append_metrics(step, {"token_mult_prob_error": 1 + excess * step / 3})
        draw(directory)
    assert limits[0] == pytest.approx((0.9995, 1.011)) and limits[-1] == pytest.approx((0.99, 1.22))


def test_a_run_of_validations_only(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", "")
    directory.append_metrics(0, {"accuracy": 0.4}, phase="validation")
    assert [path.stem for path in draw(directory)] == ["accuracy", "overview"]


def test_a_name_that_looks_like_a_formula(tmp_path):
    directory = RunDirectory.create(tmp_path / "lr_$1e-5\\foo$_{x}", "")
    directory.append_metrics(1, {"loss": 1.0})
    assert len(draw(directory)) == 2


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"must be the folder of a run"):
        draw(tmp_path)


def test_a_picture_for_the_report_has_the_colors_of_its_page():
    steps = [1, 2, 3]
    text, edges = svg("loss", (steps, [1.0, 0.5, 0.25]), (steps, [2.0, 1.0, 0.5]))
    assert text.startswith("<svg") and "<style" not in text and "#" not in text.split("url(#")[0]
    for name in ("train", "val", "line", "dim", "card"):
        assert f"var(--{name})" in text
    assert edges[0] < 1 and edges[1] > 3
    for values in ([0.0], [1e-9, -2e-9], [1e12, 2e12], [5.0, 5.0]):
        assert "<path" in svg("my_own", ([*range(len(values))], values), ([], []))[0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.floats(0.1, 10))
def test_smoothing_stays_between_the_extremes(values, width):
    smoothed = smooth(values, width=width)
    assert len(smoothed) == len(values)
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in smoothed)


def test_drawing_leaves_pyplot_alone():
    """No window system is asked for, and a notebook's own backend stays."""
    code = "import sys, nemorl.runtime.watch.plots; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DISPLAY": ":none"})
