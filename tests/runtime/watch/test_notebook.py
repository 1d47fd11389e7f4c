"""A run in a notebook, with a real kernel."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.runtime.runs import saved_model

CELL = """import nemorl
rows = [{"prompt": "1+1=", "response": "2"}] * 8
result = nemorl.train(
    "model", rows, algorithm="sft", max_num_steps=4, train_global_batch_size=4,
    max_total_sequence_length=1000, device="cpu", num_epochs=4,
    run={"plots": False, "export": False},
)
result"""


def test_a_run_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With one panel, the result as a table, and warnings with the cell's line."""
    import nbclient
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbformat.v4 import new_code_cell, new_notebook

    saved_model(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    notebook = new_notebook(cells=[new_code_cell(CELL)])
    limits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), 600)
    # In a folder with a path that is short enough for sockets, as those of pytest may not be.
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        manager = AsyncKernelManager(transport="ipc", connection_file=f"{sockets}/kernel.json")
        manager._kernel_spec = KernelSpec(argv=launch, language="python")
        path = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, km=manager, resources=path, **limits).execute()
    outputs = notebook.cells[0].outputs
    displays = [each.data for each in outputs if each.output_type == "display_data"]
    (shown,) = [data for data in displays if "step 4/4" in data["text/plain"]]
    assert "4/4" in shown["text/html"]
    assert not [data for data in displays if "step 1/4" in data["text/plain"]], "one, redrawn"
    (result,) = [each for each in outputs if each.output_type == "execute_result"]
    assert "<b>TrainResult</b><table>" in result.data["text/html"]
    assert result.data["text/plain"].startswith("TrainResult(step=4, ")
    said = "".join(each.text for each in outputs if each.get("name") == "stderr")
    assert ".py:3: UserWarning: data.max_total_sequence_length is lowered" in said, said
