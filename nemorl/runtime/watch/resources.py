"""What a run uses of its computer, measured after every step: some 50 microseconds a reading."""

import psutil
import torch

from nemorl.parallel.measure import GIGABYTE, gpu_peaks


class ResourceMeter:
    """Use of processor and memory by this process and, where the model is on a GPU, of that.

    cpu_percent: mean since the last reading; 100 is one core · memory_gb: resident memory, in 10^9
    bytes · gpu_memory_gb: the most that PyTorch's tensors took since the last reading ·
    gpu_percent: utilisation now, where NVIDIA's library can be asked (nvidia-ml-py).
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first reading is what later ones count from
        self.gpu = torch.cuda.is_available()
        self.can_ask = self.gpu

    def read(self) -> dict[str, float]:
        found = {
            "cpu_percent": self.process.cpu_percent(),
            "memory_gb": self.process.memory_info().rss / GIGABYTE,
        }
        if self.gpu:
            found["gpu_memory_gb"] = gpu_peaks.take() / GIGABYTE
            found |= self._utilisation()
        return found

    def _utilisation(self) -> dict[str, float]:
        if self.can_ask:
            try:
                return {"gpu_percent": float(torch.cuda.utilization())}
            except (ImportError, RuntimeError):  # the library is missing, or refuses
                self.can_ask = False
        return {}
