"""How a line of a trace looks, for those who write it and those who read it."""

from __future__ import annotations

CALL = b" " * 8  # a call has no time: `        package.module:12 function`


def prefix(seconds: int | None = None, *, pid: int | None = None, thread: str | None = None) -> bytes:
    """What stands before the text of a line: `4711 0:01:02 [MainThread] `, each part only if it is asked for.

    prefix(62)  # b"0:01:02 "
    """
    words = [] if pid is None else [str(pid)]
    words += [] if seconds is None else [clock(seconds)]
    words += [] if thread is None else [f"[{thread}]"]
    return "".join(word + " " for word in words).encode("utf-8", "backslashreplace")


def clock(seconds: int) -> str:
    """Seconds since the start as h:mm:ss; hours go on beyond a day.

    clock(3661)  # "1:01:01"
    """
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


def shorten(text: bytes, most: int) -> bytes:
    """`text` on one line of at most `most` bytes; what is cut off is marked, and no character is cut in two."""
    text = text.replace(b"\r", b"\\r").replace(b"\n", b"\\n")
    if len(text) <= most:
        return text
    return text[: most - 3].decode("utf-8", "ignore").encode("utf-8", "surrogateescape") + b"..."
