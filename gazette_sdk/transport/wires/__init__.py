"""Wires: carriers of calls to brokers.

Read in this order:

- `base`: the interface of a wire, its options, and the forms in which it takes an append.
- `call_status`, `tls`: errors of calls, certificates.
- `grpc`: the wire that every Gazette broker speaks.
- `stream`: the fast wire of this package, and the choice between the two.
"""
