from support.tools import gazctl, gazette

__all__ = ["gazctl", "gazette"]
