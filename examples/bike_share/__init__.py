"""Rides of shared bikes: cycles that bikes close, found in SQL, published and queried."""
