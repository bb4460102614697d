"""Routes of journals, and the choice of a broker for each call."""
