from support.wires import certifier, wire

__all__ = ["certifier", "wire"]
