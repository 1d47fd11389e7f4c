"""The type checker behind the import hook of conftest.py.

It imports nothing of nemorl: the hook has to be there first.
"""

import random
from unittest import mock

# beartype checks a random item of a list. It gets a generator of its own, so that a test which
# seeds Python's sees the draws of the run alone.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""As type checkers and Python itself have it, an int will do where a float is asked for:

`clip_low=0`.
"""
