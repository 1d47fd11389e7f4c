"""Warn with the user's line, not with one of the library."""

import sys
import sysconfig
import warnings
from os import sep
from pathlib import Path

INSIDE = (f"{Path(__file__).parent}{sep}", f"{sysconfig.get_path('stdlib')}{sep}", "<frozen ")
"""How the names of files begin that are not the user's; installed packages are not, either."""


def warn(message: str) -> None:
    """Issue a UserWarning for the line of the script or notebook cell that called nemorl.

    In a thread it names the line that called this function.
    """
    here = sys._getframe(1)
    frame = here
    while frame.f_code.co_filename.startswith(INSIDE) or f"-packages{sep}" in (
        frame.f_code.co_filename
    ):
        if frame.f_back is None:
            frame = here
            break
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
