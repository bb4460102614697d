"""Routes of journals.

Read in this order:

- `routed`: the journal service over a wire: broker, token and checks of each call.
- `route_cache`: routes as brokers sent them, and what is prepared for them.
- `dispatcher`: the broker of a call. Pure.
- `append_route`: the way of a journal's appends over a wire.
"""
