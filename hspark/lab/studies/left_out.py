"""What a study raises when it cannot be made."""


class LeftOutError(ValueError):
    """A study that this table, or what was given beside it, does not carry; says what it needs."""
