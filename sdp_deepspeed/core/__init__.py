"""The core of the second edition: masking and parallelism on process groups of holders, free of DeepSpeed."""
