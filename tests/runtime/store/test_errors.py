import pytest

from nemorl.runtime.store.files import WorkerError, in_words, raised


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a must be 1"), ValueError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad byte"), WorkerError),
        (ExceptionGroup("two", [ValueError("a")]), WorkerError),
        (SystemExit(3), WorkerError),
    ],
)
def test_an_error_of_a_worker_keeps_its_words(error, kind):
    found = raised(in_words(error), 1)
    assert type(found) is kind and str(error) in str(found)
    assert found.__notes__[0].startswith("in worker 1:\n")
