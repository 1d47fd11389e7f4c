"""`python -m nemorl`: the command line, also as torchrun starts it (`torchrun --nproc-per-node 2 -m nemorl sft …`)."""

import sys

from nemorl.runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
