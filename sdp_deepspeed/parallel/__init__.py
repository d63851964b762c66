"""Data parallelism over the holders of each slice: process groups, buckets, sharded optimizer, gradient norm."""
