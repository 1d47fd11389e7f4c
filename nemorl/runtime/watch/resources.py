"""What a run uses of its computer, measured after every step."""

import psutil
import torch

from nemorl.parallel.measure import GIGABYTE, gpu_peaks
from nemorl.runtime.store.state import RunView
from nemorl.runtime.watch.callbacks import Callback


class ResourceMeter(Callback):
    """Add to the metrics of every step:

    cpu_percent: of this process; 100 is one core · memory_gb: resident, in 10^9 bytes ·
    gpu_memory_gb: the most that PyTorch's tensors took · gpu_percent: where NVIDIA's library
    (nvidia-ml-py) can be asked.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first reading is what later ones count from
        self.gpu = self.can_ask = torch.cuda.is_available()

    def on_step_end(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        metrics.update(self.read())

    def read(self) -> dict[str, float]:
        found = {
            "cpu_percent": self.process.cpu_percent(),
            "memory_gb": self.process.memory_info().rss / GIGABYTE,
        }
        if self.gpu:
            found["gpu_memory_gb"] = gpu_peaks.take() / GIGABYTE
        if self.can_ask:
            try:
                found["gpu_percent"] = float(torch.cuda.utilization())
            except (ImportError, RuntimeError):  # the library is missing, or refuses
                self.can_ask = False
        return found
