"""Bytes of model state and of traffic per parameter: `python -m sdp_deepspeed.estimate --ranks 8 --coverage 0.5`."""

from sdp_deepspeed.estimate.formulas import main

if __name__ == "__main__":
    main()
