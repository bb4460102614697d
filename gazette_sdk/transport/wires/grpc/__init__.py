"""Journals over gRPC: the wire that every Gazette broker speaks."""
