"""Words of all history: the batch counterpart of a shard that counts words."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everywhere in PySpark

WORD = r"[a-z]+"
"""Words of a lower-case text."""


def word_count(messages: DataFrame, *, column: str = "text", word: str = WORD) -> DataFrame:
    """Return the words of a column with their counts, the most frequent first.

    Args:
        messages: rows of the messages.
        column: name of the column with texts.
        word: regular expression of Java for a word of the text in lower case.

    Returns:
        Rows of ``word`` (string) and ``count`` (long).
    """
    words = F.explode(F.regexp_extract_all(F.lower(F.col(column)), F.lit(word), F.lit(0)))
    return (
        messages.select(words.alias("word"))
        .groupBy("word")
        .count()
        .orderBy(F.desc("count"), F.asc("word"))
    )
