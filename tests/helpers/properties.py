"""How many examples of a property are drawn: more in the whole run."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"  # the profile of the whole run
SHARE = 4  # what the inner loop takes of the usual examples

# A machine under load is no failure; half of the usual examples fit into the suite's twenty minutes.
settings.register_profile(THOROUGH, deadline=None, max_examples=settings().max_examples // 2)
settings.register_profile("quick", deadline=None, max_examples=settings().max_examples // SHARE)
settings.load_profile("quick")


def examples(count: int) -> settings:
    """Half of `count` examples with the profile "thorough", a quarter without."""
    is_thorough = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=count // 2 if is_thorough else count // SHARE)
