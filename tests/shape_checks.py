"""The type checker behind the import hook of conftest.py.

It imports nothing of nemorl: the hook has to be there first.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""As type checkers and Python itself have it, an int will do where a float is asked for:

`clip_low=0`.
"""
