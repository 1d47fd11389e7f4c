"""How long GPUs take for a product, other kernels and collectives: rooflines. Free of torch."""

import math
from dataclasses import dataclass

SUSTAINED = 0.7
"""Share of the peak that a large product reaches; an estimate (H100s lower their clock)."""
ATTENTION = 0.4
"""The same of attention: FlashAttention-2 has 335 to 400 of an H100's 989 TFLOP/s, by the paper of
FlashAttention-3 (arXiv:2407.08608).
"""
FLOAT32 = 67 / 989
"""What float32 has of bfloat16's peak, by NVIDIA's data sheet of the H100 SXM."""
PROCESSORS, TILE, SLICE = 132, 128, 2048
"""Streaming multiprocessors of an H100 SXM, and the part of a product that one computes at a time:
its rows and columns, and as many terms of sums as are worth a part of their own (an estimate).
"""
LAUNCH = 5e-6
"""Seconds in which Python starts a kernel, so that shorter ones leave a GPU idle; an estimate."""
LINKS = 0.8
"""Share of a link's bandwidth that NCCL's collectives reach; an estimate."""
CALL, MACHINE = 20e-6, 5e-6
"""Seconds of a collective without any bytes, and of each further machine; estimates."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The rates of a GPU, per second, and where the ranks are."""

    flops: float
    memory: float
    near: float
    """Bytes to the other GPUs of its machine, in each direction."""
    far: float
    """Bytes to other machines."""
    gpus: int
    per_machine: int

    def product(
        self, rows: float, inner: float, columns: float, *, size: int, more: float = 0
    ) -> float:
        """Return the seconds of [rows, inner] · [inner, columns] with numbers of `size` bytes.

        more: bytes read and written besides.
        """
        done = 2 * rows * inner * columns / efficiency(rows, inner, columns)
        moved = size * (rows * inner + inner * columns + rows * columns) + more
        rate = self.flops * (FLOAT32 if size == 4 else 1) * SUSTAINED
        return max(done / rate, moved / self.memory, LAUNCH)

    def attention(self, flops: float, *, size: int) -> float:
        """Return the seconds of attention's products."""
        rate = ATTENTION if size == 2 else FLOAT32 * SUSTAINED
        return flops / (self.flops * rate)

    def kernels(self, moved: float, count: float) -> float:
        """Return the seconds of `count` kernels that move so many bytes, one after the other."""
        return max(moved / self.memory, count * LAUNCH)

    def together(self, stride: int, size: int) -> int:
        """Return how many of a group, whose ranks are `stride` apart, are surely on one machine.

        Ranks are in machines' order. Groups whose span does not divide a machine's GPUs begin in
        one machine and end in the next.
        """
        if self.gpus <= self.per_machine:
            return size
        return max(1, min(size, math.gcd(self.per_machine, stride * size) // stride))

    def ring(self, sent: float, calls: float, *, stride: int, size: int) -> float:
        """Return the seconds in which each rank of a group sends its neighbor so many bytes.

        Ranks that are together have a network card each, and share a ring's way out between them.
        """
        if size == 1:
            return 0.0
        together = self.together(stride, size)
        rate = self.near if together == size else min(self.near, together * self.far)
        return sent / (LINKS * rate) + calls * self._call(size, together)

    def exchange(self, sent: float, calls: float, *, stride: int, size: int) -> float:
        """Return the seconds in which each rank of a group sends so many bytes to the others in
        equal parts (all-to-all).
        """
        if size == 1:
            return 0.0
        together = self.together(stride, size)
        out = sent * (size - together) / (size - 1)
        moved = max((sent - out) / self.near, out / self.far)
        return moved / LINKS + calls * self._call(size, together)

    def _call(self, size: int, together: int) -> float:
        return CALL + MACHINE * (size / together - 1)


def efficiency(rows: float, inner: float, columns: float) -> float:
    """Return the share of its multiprocessors' time that a GPU uses for a product: those without a
    part of it are idle, and parts are computed whole.

    >>> [round(efficiency(rows, 2048, 1536), 2) for rows in (16, 128, 1024, 4096)]
    [0.01, 0.09, 0.73, 1.0]
    """
    across, down = math.ceil(rows / TILE), math.ceil(columns / TILE)
    filled = rows * columns / (across * down * TILE**2)
    return filled * min(1, across * down * max(1, inner // SLICE) / PROCESSORS)
