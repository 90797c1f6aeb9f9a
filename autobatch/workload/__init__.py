"""What the user hands over, and how its samples are read."""
