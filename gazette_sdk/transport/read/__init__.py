"""Reads of journals: one call, reads across failures, stored fragments."""
