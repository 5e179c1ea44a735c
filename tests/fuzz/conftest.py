"""HOW long is fuzzed? A few examples a test in the suite; PACELINE_FUZZ=4000 of them with `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
EXAMPLES = int(os.environ.get("PACELINE_FUZZ", "0"))
settings.register_profile("suite", max_examples=60, deadline=None, derandomize=True, suppress_health_check=QUIET)
settings.register_profile(
    "long", max_examples=max(1, EXAMPLES), deadline=None, print_blob=True, suppress_health_check=QUIET
)
settings.load_profile("long" if EXAMPLES else "suite")
