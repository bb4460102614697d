from support.stores import *  # noqa: F403
