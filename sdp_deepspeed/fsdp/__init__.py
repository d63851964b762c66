"""The FSDP2 host: each unit is sharded over its holders (README.md beside this file)."""
