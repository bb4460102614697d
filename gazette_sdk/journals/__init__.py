"""Administration of journals: create, list, update and delete them from code.

Read in this order:

- ``admin``: :class:`Journals`, for plain code and coroutines
- ``journal``: :class:`Journal`, a listed journal
- ``options``: values of a journal that callers give, and their defaults
- ``creation``: partitions of a topic, and defaults that depend on the cluster
- ``changes``: changes of journals against what exists; transactions and conflicts
"""

from gazette_sdk.journals.admin import Journals
from gazette_sdk.journals.journal import Journal, JournalOptions

__all__ = ["Journal", "JournalOptions", "Journals"]
