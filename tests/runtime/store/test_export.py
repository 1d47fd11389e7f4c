import errno
import os

import pytest

from nemorl.runtime.store.export import replacing


def test_a_failed_export_leaves_nothing_but_the_earlier_one(tmp_path):
    with replacing(tmp_path / "hf") as folder:
        (folder / "weights").write_text("first")
    said = rf"the model could not be written to {tmp_path}/hf \(.*No space.*\): make room"
    with pytest.raises(OSError, match=said), replacing(tmp_path / "hf") as folder:
        (folder / "weights").write_text("sec")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "weights").read_text() == "first"
