"""What is costly is done in full in the whole run only: many examples of a property, a large problem."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

THOROUGH = "thorough"  # the profile of the whole run: `--hypothesis-profile=thorough`
FUZZ = "fuzz"  # the profile of the fuzzers on demand
FUZZ_EXAMPLES = 3000  # of each property with that profile
FUZZ_EXAMPLES_OTHERWISE = 30  # a few seconds for all of them
SHARE = 4  # what the inner loop takes of it

# A machine under load is no failure; half of the usual examples fit into the suite's twenty minutes.
settings.register_profile(THOROUGH, deadline=None, max_examples=settings().max_examples // 2)
settings.register_profile("quick", deadline=None, max_examples=settings().max_examples // SHARE)
settings.register_profile(FUZZ, deadline=None)
settings.load_profile("quick")


def is_thorough() -> bool:
    return settings.get_current_profile_name() == THOROUGH


def examples(count: int) -> settings:
    """Half of `count` examples with the profile "thorough", a quarter without."""
    return settings(max_examples=count // 2 if is_thorough() else count // SHARE)


def fuzzed() -> settings:
    """Of a fuzzer; what it draws may be large, and much of it is refused."""
    count = FUZZ_EXAMPLES if settings.get_current_profile_name() == FUZZ else FUZZ_EXAMPLES_OTHERWISE
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


def thorough_only() -> pytest.MarkDecorator:
    """A mark of what takes seconds. The profile is known when tests are collected, not yet when this file is read."""
    return pytest.mark.skipif(not is_thorough(), reason=f"takes seconds: needs the profile {THOROUGH}")


def large(*values: object) -> object:
    """A parameter set of a problem that takes seconds."""
    return pytest.param(*values, marks=thorough_only())
