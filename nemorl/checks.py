"""How a wrong value is refused, everywhere alike: field, requirement, value, remedy."""


def require(condition: bool, field_name: str, requirement: str, value: object, remedy: str) -> None:
    """Raise a ValueError that names the field, what was expected, what came, and what to do.

    >>> require(False, "optimizer.lr", "must be positive", -1.0, "try 1e-5")
    Traceback (most recent call last):
    ValueError: optimizer.lr must be positive, but it is -1.0: try 1e-5
    """
    if not condition:
        raise ValueError(f"{field_name} {requirement}, but it is {value!r}: {remedy}")


def at_least(minimum: float, **values: float | None) -> None:
    for name, value in values.items():
        require(
            value is None or value >= minimum,
            name.replace("__", "."),
            f"must be at least {minimum}",
            value,
            f"use {minimum} or more",
        )
