import pytest

from nemorl.runtime.run.directory import RunDirectory
from nemorl.runtime.watch import plots
from nemorl.runtime.watch.alerts import SignalWatch
from nemorl.runtime.watch.plots import PlotCallback
from tests.runtime.tiny import tiny_run


def test_plots_are_drawn_at_the_end_and_never_fail_a_run(tmp_path, monkeypatch):
    directory = RunDirectory.create(tmp_path / "run", "")
    directory.append_metrics(1, {"loss": 1.0})
    PlotCallback(directory).on_train_end(tiny_run(), {})
    assert (directory.plots / "loss.png").exists()

    def broken(directory):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(plots, "draw", broken)
    with pytest.warns(UserWarning, match=r"could not be drawn.*no fonts"):
        PlotCallback(directory).on_train_end(tiny_run(), {})


def test_a_run_without_a_signal_is_warned_of_once():
    watch = SignalWatch(patience=3)
    informative = [1, 0, 0, 1, 0, 0, 0, 0, 0]
    with pytest.warns(UserWarning, match="step 7: for 3 steps all responses") as caught:
        for step, share in enumerate(informative, start=1):
            watch.on_step_end(tiny_run(step=step), step, {"informative_groups": float(share)})
    assert len(caught) == 1


def test_steps_that_update_nothing_are_warned_of_ever_more_rarely():
    watch = SignalWatch()
    with pytest.warns(UserWarning, match="nothing to learn from") as caught:
        for step, updates in enumerate([2, 0, 0, 2, 0, 0, 0, 0], start=1):
            watch.on_step_end(tiny_run(step=step), step, {"num_updates": float(updates)})
    assert [str(warning.message).split(":")[0] for warning in caught] == [
        "step 2",
        "step 3",
        "step 6",
    ]
