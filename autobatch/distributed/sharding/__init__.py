"""A model that ranks share by FSDP2: its construction, its steps and its checkpoints."""
