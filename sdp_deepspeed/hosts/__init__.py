"""Checks of the hosts of a run before its long start: `sdp hosts`."""
