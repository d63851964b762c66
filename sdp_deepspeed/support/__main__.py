"""The support matrix: `python -m sdp_deepspeed.support [README.md]`."""

import sys

from sdp_deepspeed.support.refusals import main

if __name__ == "__main__":
    main(sys.argv[1:])
