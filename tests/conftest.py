"""What holds for all tests."""

from hypothesis import settings

# A busy machine makes any example slow; how long things take is the business of benchmarks/.
settings.register_profile("gazette", deadline=None)
settings.load_profile("gazette")
