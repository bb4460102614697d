"""Systems that messages are measured on: ours, and what else a Python user could pick.

- ``contender``: what each of them does, in the same order, with the same messages
- ``gazette``: ours, in all the ways to publish and to read
- ``redis_streams``, ``nats_jetstream``, ``kafka``: the others, with their own clients
- ``servers/``: settings of their servers, and the versions of what ``scripts/peers`` installs
"""
