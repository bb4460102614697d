"""Appends of the client.

Read in this order:

- ``queue``: Queue of the appends of one journal: what may be sent, and what follows from an
  answer. Pure.
- ``append``: One append as one call: its requests, its errors, and attempts until it succeeds.
- ``appender``: Appender of one journal: sends what its queue holds, in order, until it is
  acknowledged.
"""
