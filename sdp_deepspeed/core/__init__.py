"""The host-independent core of subnetwork data parallelism."""
