"""The DeepSpeed host: an engine whose module is a rank's subnetwork."""
