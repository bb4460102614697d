"""Systems to compare: Gazette and others for Python users.

- ``contender``: the common measurement
- ``gazette``: Gazette, with all methods of publishing and reading
- ``redis_streams``, ``nats_jetstream``, ``kafka``: the others, with their own clients
- ``servers/``: settings of their servers, and the versions that ``scripts/peers`` installs
"""
