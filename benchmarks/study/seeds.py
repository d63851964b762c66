"""Which seeds figures are of."""

TUNING_SEED = 99  # learning rates are chosen with it; no figure has it
