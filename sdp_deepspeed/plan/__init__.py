"""The plan: which subnetwork holds which unit."""
