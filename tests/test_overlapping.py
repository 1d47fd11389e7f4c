"""Settings of the process that several blocks need: changed by the first, restored by the last."""

import threading

from nemorl.overlapping import Overlapping

done: list[str] = []


def change():
    """Change it."""
    done.append("change")
    return lambda: done.append("restore")


def test_the_first_changes_and_the_last_restores():
    done.clear()
    block = Overlapping(change)
    assert block.__doc__ == "Change it."
    with block:
        other = threading.Thread(target=block.__enter__)
        other.start()
        other.join()
        assert done == ["change"]
    assert done == ["change"]
    block.__exit__()
    assert done == ["change", "restore"]
    with block:
        pass
    assert done == ["change", "restore"] * 2
