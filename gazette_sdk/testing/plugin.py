"""The pytest plugin: fixtures for tests against a real cluster."""
