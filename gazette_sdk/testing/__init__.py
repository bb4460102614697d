"""Test tools for users of the SDK.

- ``plugin``: the pytest fixtures ``gazette`` and ``gazette_cluster``
- ``framings``: contract tests of a :class:`~gazette_sdk.framing.Framing`
- ``transports``: contract tests of a :class:`~gazette_sdk.transport.base.Transport`
"""
