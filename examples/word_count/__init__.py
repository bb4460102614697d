"""Counts the words of English text which is published to partitioned journals."""
