"""Appends at their primary (broker sections 5, 8 and 9).

- ``machine``: The append state machine, as tables (broker section 5).
- ``preconditions``: Preconditions of an append: a route that is written, a healthy store; else
  the proxy.
- ``pulse``: Pulses: empty appends which a broker makes to its own journals (broker section 9).
- ``content``: Content of one append, from its client to every replica, and its rates (broker
  sections 5.3 and 8).
- ``append``: The driver of the append machine: one append, from its request to its response.
- ``common_case``: The common case of an append, in one synchronous function (broker section 5).
"""
