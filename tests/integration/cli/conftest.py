from support.tools import cluster, gazctl, gazette

__all__ = ["cluster", "gazctl", "gazette"]
