"""Text: numbers and names as they stand in messages."""


def shortened(names: list[str], count: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def first_line(error: BaseException) -> str:
    """What an exception says, in one line that fits into one of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def one_line(message: str) -> str:
    """A message as one line, whatever the names in it hold."""
    return message.replace("\r", "\\r").replace("\n", "\\n")


def counted(count: int | str, name: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    number = count if isinstance(count, str) else f"{count:,}"
    return f"{number} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")
