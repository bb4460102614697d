"""Administration of journals: create, list, update and delete them from code.

Read in this order:

- ``journal``: A listed journal, as a plain dataclass.
- ``changes``: Changes of journals against what exists: outcomes, transactions and conflicts.
- ``admin``: Journals of a cluster: create, list, update and delete them.
"""

from gazette_sdk.journals.admin import Journals
from gazette_sdk.journals.journal import Journal, JournalOptions

__all__ = ["Journal", "JournalOptions", "Journals"]
