from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from nemorl.runtime.watch.callbacks import closing
from nemorl.runtime.watch.loggers import TensorBoardLogger
from tests.runtime.tiny import recorder, walk


def test_events_of_repeated_steps_are_hidden(directory, monkeypatch):
    # Files of one second are ordered by the text of this number, so 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for steps in (range(1, 6), range(4, 7)):  # killed after 5, resumed after 3
        callback = recorder(directory, tensorboard=TensorBoardLogger)
        with closing([callback]):
            walk(callback, steps)
        callback.close()  # once more does no harm
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("validation/loss")][:2] == [2.0, 1.0]
