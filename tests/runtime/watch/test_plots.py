import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from nemorl.runtime.store.directory import RunDirectory
from nemorl.runtime.watch import curves
from nemorl.runtime.watch.curves import PlotCallback, draw
from nemorl.runtime.watch.metrics import LABELS, smooth
from tests.runtime.tiny import tiny_run


def learning_run(directory: RunDirectory, *, steps: int) -> None:
    generator = random.Random(0)
    names = [name for name in LABELS if name != "margin"]
    for step in range(1, steps + 1):
        values = {name: 1 - math.exp(-step / 40) + generator.gauss(0, 0.04) for name in names}
        directory.append_metrics(step, values)
        if step % 20 == 0:
            directory.append_metrics(step, {"reward": 0.5, "accuracy": 0.5}, phase="validation")


@pytest.mark.slow
def test_every_metric_has_its_picture(directory):
    learning_run(directory, steps=60)
    files = draw(directory)
    names = (name.replace("/", "_") for name in LABELS if name != "margin")
    assert [path.stem for path in files] == [*names, "overview"]
    for path in files:
        image = imread(path)
        assert image.shape[0] >= 500 and image.shape[1] >= 900
        assert image[..., :3].min() < 0.4 and image[..., :3].std() > 0.03, "something is drawn"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([{"loss": 2.0, "grad_norm": 0.1}], ["loss", "overview"]),
        ([{"loss": 2.0}, {"loss": math.nan}, {"loss": math.inf}], ["loss", "overview"]),
        ([{"reward": 0.0}, {"reward": 0.0}, {"kl": math.nan}], ["reward", "overview"]),
        ([{"tokens_per_second": 0.0}], ["tokens_per_second", "overview"]),
        ([{"margin": 0.5}], ["margin", "overview"]),
        ([{"grad_norm": 0.1}], []),
        ([{"failed_fraction": 0.0, "turns": 1.0}], []),
        ([{"failed_fraction": 0.0, "turns": 1.0}, {"turns": 2.0}], ["turns", "overview"]),
        ([], []),
    ],
)
def test_only_metrics_that_are_there(directory, lines, expected):
    for step, metrics in enumerate(lines, start=1):
        directory.append_metrics(step, metrics)
    assert [path.stem for path in draw(directory)] == expected


def test_agreement_of_sampler_and_trainer_is_a_flat_line(tmp_path, monkeypatch):
    """But a wide gap is seen."""
    limits, panel = [], curves.panel

    def watched(axes, *arguments):
        panel(axes, *arguments)
        limits.append(axes.get_ylim())

    monkeypatch.setattr(curves, "panel", watched)
    for excess in (1e-6, 0.2):
        directory = RunDirectory.create(tmp_path / str(excess), "")
        for step in range(1, 4):
            directory.append_metrics(step, {"token_mult_prob_error": 1 + excess * step / 3})
        draw(directory)
    assert limits[0] == pytest.approx((0.9995, 1.011)) and limits[-1] == pytest.approx((0.99, 1.22))


def test_a_name_that_looks_like_a_formula(tmp_path):
    directory = RunDirectory.create(tmp_path / "lr_$1e-5\\foo$_{x}", "")
    directory.append_metrics(1, {"loss": 1.0})
    assert len(draw(directory)) == 2


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.floats(0.1, 10))
def test_smoothing_stays_between_the_extremes(values, width):
    smoothed = smooth(values, width=width)
    assert len(smoothed) == len(values)
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in smoothed)


def test_plots_are_drawn_at_the_end_and_never_fail_a_run(directory, monkeypatch):
    directory.append_metrics(1, {"loss": 1.0})
    PlotCallback(directory).on_train_end(tiny_run(), {})
    assert (directory.plots / "loss.png").exists()

    def broken(directory):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(curves, "draw", broken)
    with pytest.warns(UserWarning, match=r"could not be drawn.*no fonts"):
        PlotCallback(directory).on_train_end(tiny_run(), {})
