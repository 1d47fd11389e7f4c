"""`python -m nemorl`: the command line, also as torchrun starts it (`torchrun --nproc-per-node 2 -m
nemorl sft …`).
"""

import os
import sys

from nemorl.runtime.cli.main import main

if __name__ == "__main__":
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's report says what was raised
        from torch.distributed.elastic.multiprocessing.errors import record

        sys.exit(record(main)())
    sys.exit(main())
