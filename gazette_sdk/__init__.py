"""Gazette for Python."""
