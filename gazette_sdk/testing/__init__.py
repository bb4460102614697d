"""What users test their own code with.

- ``plugin``: the pytest fixtures ``gazette`` and ``gazette_cluster``
- ``framings``: tests that any :class:`~gazette_sdk.framing.Framing` must pass; derive from them
- ``transports``: a suite that any :class:`~gazette_sdk.transport.base.Transport` can be run through
"""
