"""How many examples a property is tried on: what is costly gets few in the inner loop, and all in the whole run."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"  # the profile of the whole run: `--hypothesis-profile=thorough`
SHARE = 5


def examples(count: int) -> settings:
    """`count` examples with the profile "thorough", a fifth of them without."""
    return settings(max_examples=count if settings.get_current_profile_name() == THOROUGH else count // SHARE)
