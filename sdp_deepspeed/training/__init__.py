"""The training program behind launch/pretrain.py: options, run folder, loop, evaluation, clean stops."""
