"""What holds for all tests."""

import signal

from hypothesis import settings

# A busy machine makes any example slow; how long things take is the business of benchmarks/.
settings.register_profile("gazette", deadline=None)
settings.load_profile("gazette")

# A shell's background job ignores SIGINT, and so would all programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
