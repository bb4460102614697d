"""Wires: gRPC, and the stream transport."""
