"""The training run: its loop, its checkpoints and resumes, its validation and its metrics."""
