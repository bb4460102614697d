"""Routes of journals.

Read in this order:

- `routed`: the journal service over a wire.
- `router`: broker, token and route of each call; the route of a journal's appends.
- `route_cache`: routes as brokers sent them, and what is prepared for them.
- `dispatcher`: the broker of a call. Pure.
"""
