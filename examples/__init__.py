"""Runnable applications, also used by tests."""
