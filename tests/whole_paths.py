"""The tests that go a whole path: one of each kind, at most 40, of up to 30 s of CPU each."""

WHOLE_PATHS: dict[str, str] = {}
"""The test and what it shows, which no small test can."""
