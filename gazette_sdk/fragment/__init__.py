"""fragment."""
