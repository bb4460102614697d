"""Appends of the client."""
