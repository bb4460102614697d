"""N-grams of a text."""

import re
from collections import deque
from collections.abc import Iterator

START = "START"
END = "END"

_WORD = re.compile(r"[^\W\d_]+")


def grams_of(text: str, n: int) -> Iterator[str]:
    """Yield the n-grams of a text, one for each of its words, and `n` for its end.

    A word is a run of letters, in lower case. Ahead of the first word stands START, behind the last
    one END.
    """
    window = deque([START] * n, maxlen=n)
    for word in [*_WORD.findall(text.lower()), *[END] * n]:
        window.append(word)
        yield " ".join(window)
