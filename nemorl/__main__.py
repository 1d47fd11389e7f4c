"""`python -m nemorl`: the command line, also as torchrun starts it (`torchrun --nproc-per-node 2 -m
nemorl sft …`).
"""

import sys

from nemorl.runtime.cli.main import main
from nemorl.runtime.ranks.following import errors_for_torchrun

if __name__ == "__main__":
    with errors_for_torchrun():
        sys.exit(main())
