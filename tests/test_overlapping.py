"""Settings of the process that several blocks need: changed by the first, restored by the last."""

import subprocess
import sys
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


def test_a_block_that_is_never_left_says_nothing_at_exit():
    """As of a backend in a script without `shutdown`."""
    code = "from nemorl.models.attention import without_cudnn_attention as block; block.__enter__()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
