"""Stand-in until this part is there."""


def install() -> None:
    """Nothing yet."""
